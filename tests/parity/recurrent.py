"""Mamba and gated delta net layers for `--spec tests.parity.recurrent hybrid`, and GPT layers for
`--spec tests.parity.recurrent linear_attention`, with torch in place of the CUDA kernels.

The kernels are those of the packages mamba_ssm and fla. Documents arrive as these take them: the
number of each token's document, or offsets in one batch row.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm import gated_delta_net, mamba_mixer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from tests.parity.specs import Norm, hybrid  # noqa: F401

try:
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
except ImportError:  # before 0.17
    variants = None


def scan(
    zxbcdt: Tensor, weight: Tensor, bias: Tensor, dt_bias: Tensor, a: Tensor, *,
    D: Tensor, headdim: int, ngroups: int, seq_idx: Tensor | None = None, **ignored: Any,
) -> Tensor:  # fmt: skip
    """As `mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined`, [b, n, z x B C dt]
    to [b, n, heads * headdim].

    The state of each head decays by exp(dt * a) and gains dt * x B; the sum over all earlier tokens
    is written as a matrix. `seq_idx` [b, n] numbers documents, at whose borders the state and the
    convolution begin anew.
    """
    b, n, _ = zxbcdt.shape
    heads = a.numel()
    inner = heads * headdim
    together = _together(torch.zeros(b, n) if seq_idx is None else seq_idx)
    z, xbc, dt = zxbcdt.split([inner, weight.shape[0], heads], -1)
    xbc = F.silu(_convolved(xbc, weight, together) + bias)
    x, keys, queries = xbc.split([inner, *[(weight.shape[0] - inner) // 2] * 2], -1)
    x = x.reshape(b, n, heads, headdim)
    keys, queries = (
        part.reshape(b, n, ngroups, -1).repeat_interleave(heads // ngroups, 2)
        for part in (keys, queries)
    )
    dt = F.softplus(dt + dt_bias)
    decay = torch.cumsum(dt * a, 1)
    passed = (decay[:, :, None] - decay[:, None]).masked_fill(~together[..., None], -torch.inf)
    weights = passed.exp() * torch.einsum("bihs,bjhs->bijh", queries, keys)
    y = torch.einsum("bijh,bjh,bjhp->bihp", weights, dt, x) + D[:, None] * x
    return y.reshape(b, n, inner) * F.silu(z)


def _together(documents: Tensor) -> Tensor:
    """Whether token j is in the document of token i, and not after it: bool [b, n, n], of the
    documents' numbers [b, n].
    """
    n = documents.shape[1]
    return (documents[:, :, None] == documents[:, None]) & torch.ones(n, n, dtype=torch.bool).tril()


def _convolved(x: Tensor, weight: Tensor, together: Tensor) -> Tensor:
    """The causal convolution of each channel of x [b, n, d] with weight [d, width], inside of
    documents.
    """
    n, width = x.shape[1], weight.shape[1]
    out = x * weight[:, -1]
    for back in range(1, min(width, n)):
        inside = together.diagonal(-back, 1, 2)[..., None]  # [b, n - back, 1]
        out = out + F.pad(x[:, : n - back] * inside, (0, 0, back, 0)) * weight[:, width - 1 - back]
    return out


def _numbers(cu_seqlens: Tensor | None, x: Tensor) -> Tensor:
    if cu_seqlens is None:
        return torch.zeros(x.shape[:2])
    assert x.shape[0] == 1 and cu_seqlens[-1] == x.shape[1], "documents must lie in one batch row"
    return torch.bucketize(torch.arange(x.shape[1]), cu_seqlens.long(), right=True)[None]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "",
    cu_seqlens: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """As `fla.modules.convolution.causal_conv1d`: x [b, n, d], weight [d, width]."""
    assert activation == "silu"
    out = _convolved(x, weight, _together(_numbers(cu_seqlens, x)))
    return F.silu(out if bias is None else out + bias), None


def l2norm(x: Tensor) -> Tensor:
    """As `fla.modules.l2norm.l2norm`."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor | None = None,
    b: Tensor | None = None,
    w: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """As `fla.ops.gated_delta_rule.chunk_gated_delta_rule`: q, k, v [b, n, heads, d], g and beta
    [b, n, heads]. As `fla.ops.gdn2.chunk.chunk_gdn2`: g and b of each channel of k, w of v.

    Token by token: the state decays by exp(g), forgets what it holds at k as far as b says, and
    learns v there as far as w says; both are beta.
    """
    if beta is not None:
        g, b, w = g[..., None], beta[..., None], beta[..., None]
    numbers = _numbers(cu_seqlens, q)
    state = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1])
    outs = []
    for i in range(q.shape[1]):
        if i and numbers[0, i] != numbers[0, i - 1]:
            state = torch.zeros_like(state)
        state = state * g[:, i, ..., None].exp()
        held = torch.einsum("bhk,bhkv->bhv", b[:, i] * k[:, i], state)
        learned = w[:, i] * v[:, i] - held
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, i], learned)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, i] * q.shape[-1] ** -0.5, state))
    return torch.stack(outs, 1), None


class GroupNorm(torch.nn.Module):
    """RMS norm of each group of channels."""

    def __init__(
        self, size: int, eps: float, group_size: int, dtype: torch.dtype, **ignored: Any
    ) -> None:
        super().__init__()
        self.weight, self.eps, self.group_size = (
            torch.nn.Parameter(torch.ones(size, dtype=dtype)),
            eps,
            group_size,
        )

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Of checkpoints: each tensor-parallel rank has the weight of its own channels."""
        state = self.state_dict(prefix="", keep_vars=True)
        return mamba_mixer.make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets
        )


class Duplicated(torch.nn.Linear):
    """A linear layer that each tensor-parallel rank has as a whole."""

    def __init__(self, size: int, out: int, *, config: Any, init_method: Any, **ignored: Any):
        super().__init__(size, out, bias=False)
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class LocalProvider(LocalSpecProvider):
    """Megatron's local parts, with norms that support --sequence-parallel."""

    def linear(self) -> type:
        return Duplicated

    def column_parallel_layer_norm_linear(self) -> type:
        return ColumnParallelLinear  # after a norm of its own

    def layer_norm(self, *args: Any, **kwargs: Any) -> type:
        return Norm


def _with_own_norm(spec: ModuleSpec) -> ModuleSpec:
    return dataclasses.replace(spec, metainfo={"fuse_input_layernorm": False})


def _local_attention(config: Any, backend: Any = None) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    return _with_own_norm(layer.submodules.self_attention)


def _local_delta_net(config: Any, backend: Any = None) -> ModuleSpec:
    return _with_own_norm(_DELTA_NET(config, backend))


def linear_attention(config: Any) -> TransformerBlockSubmodules:
    """The layers of --experimental-attention-variant gated_delta_net, which Megatron itself makes
    of TransformerEngine's parts alone.
    """
    LocalSpecProvider.layer_norm = LocalProvider.layer_norm  # of the layers that predict
    if config.experimental_attention_variant == "dsa":
        from megatron.core.transformer.experimental_attention_variant import absorbed_mla

        absorbed_mla.TELinear = Duplicated
    return variants.get_transformer_block_with_experimental_attention_variant_spec(config)


if variants is not None:
    _DELTA_NET = variants.get_gated_delta_net_module_spec
    variants.get_gated_delta_net_module_spec = _local_delta_net
    variants._get_self_attention_module_spec = _local_attention
    variants._get_backend_spec_provider = lambda config: LocalProvider()
mamba_mixer.HAVE_MAMBA_SSM = True
mamba_mixer.mamba_split_conv1d_scan_combined = scan
mamba_mixer._check_mamba_sequence_packing_support = lambda **_: (True, None)
mamba_mixer.ExtendedRMSNorm = GroupNorm
for _name, _module in list(sys.modules.items()):
    if _name.startswith(gated_delta_net.__name__):
        _module.HAVE_FLA, _module.l2norm = True, l2norm
        _module.causal_conv1d, _module.chunk_gated_delta_rule = causal_conv1d, delta_rule
        if hasattr(_module, "chunk_gdn2"):  # since 0.20
            _module.chunk_gdn2 = delta_rule
