"""The CUDA kernels of the packages mamba_ssm and fla, in torch: the recurrence, token by token or as
a matrix.

Documents arrive as these take them: the number of each token's document, or offsets in one batch
row. A call that the real kernels would not take is an error.
"""

import functools
import inspect

import torch
import torch.nn.functional as F

_CHUNKED = (
    "scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
)
SIGNATURES = {
    "chunk_gated_delta_rule": (
        f"q, k, v, g, beta, {_CHUNKED}use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
        "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, "
        "cp_context=None"
    ),
    "chunk_gated_delta_product": (
        "q, k, v, g, beta, num_householder, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, "
        "cu_seqlens_cpu=None, cp_context=None"
    ),
    "chunk_kda": (
        f"q, k, v, g, beta, {_CHUNKED}use_gate_in_kernel=False, A_log=None, dt_bias=None, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, "
        "lower_bound=None, disable_recompute=False, return_intermediate_states=False, "
        "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None"
    ),
    "chunk_gdn2": (
        f"q, k, v, g, b, w, {_CHUNKED}use_gate_in_kernel=False, cu_seqlens=None, "
        "cu_seqlens_cpu=None, safe_gate=False, lower_bound=None, disable_recompute=False, "
        "return_intermediate_states=False, state_v_first=False, cp_context=None"
    ),
    "causal_conv1d": (
        "x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, "
        "activation=None, backend='triton', cu_seqlens=None, cu_seqlens_cpu=None, "
        "chunk_indices=None, cp_context=None"
    ),
    "mamba_chunk_scan_combined": (
        "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, "
        "seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float('inf')), "
        "return_final_states=False, return_varlen_states=False"
    ),
    "mamba_split_conv1d_scan_combined": (
        "zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, "
        "seq_idx=None, dt_limit=(0.0, float('inf')), return_final_states=False, "
        "activation='silu', rmsnorm_weight=None, rmsnorm_eps=1e-06, outproj_weight=None, "
        "outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True"
    ),
}
"""Parameters of the real kernels of fla-core 0.6.0 (ops/gated_delta_rule/chunk.py, ops/gdn2/chunk.py,
ops/gated_delta_product/chunk.py, ops/kda/chunk.py, modules/causal_conv1d/ops.py)
and mamba_ssm 2.3.2.post1 (ops/triton/ssd_combined.py), without those that take whatever other name.
"""


def _called_as(*names):
    """Decorates a stand-in: its calls must fit the signature of one of these kernels."""
    signatures = [
        inspect.signature(eval(f"lambda {text}: 0"))
        for name, text in SIGNATURES.items() if name in names
    ]  # fmt: skip

    def decorate(function):
        @functools.wraps(function)
        def call(*args, **named):
            gdn2 = len(signatures) > 1 and "w" in named
            signatures[-1 if gdn2 else 0].bind_partial(*args, **named)
            return function(*args, **named)

        return call

    return decorate


@_called_as("mamba_chunk_scan_combined")
def chunk_scan(
    x, dt, A, B, C, *,
    D, dt_bias, dt_softplus, z=None, initial_states=None, seq_idx=None,
    return_final_states=False, **ignored,
):  # fmt: skip
    """As `mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined`: x and z [b, n, h, p], dt [b,
    n, h], B and C [b, n, groups, s], states [b, h, p, s].

    The state of each head decays by exp(dt * A) and gains dt * x B; the sum over all earlier tokens
    is written as a matrix. `seq_idx` [b, n] numbers documents, at whose borders the state begins
    anew: the initial states are those of document 0, the final ones those of the last document.
    """
    assert dt_softplus
    heads, numbers = A.numel(), torch.zeros(x.shape[:2]) if seq_idx is None else seq_idx
    B, C = (part.repeat_interleave(heads // part.shape[2], 2) for part in (B, C))
    dt, together = F.softplus(dt + dt_bias), _together(numbers)
    decay = torch.cumsum((dt * A).double(), 1)  # so that differences of long sums are exact
    passed = (decay[:, :, None] - decay[:, None]).masked_fill(~together[..., None], -torch.inf)
    passed, decay = passed.exp().to(x.dtype), decay.to(x.dtype)
    y = torch.einsum("bijh,bihs,bjhs,bjh,bjhp->bihp", passed, C, B, dt, x) + D[:, None] * x
    last = torch.einsum("bjh,bjhs,bjh,bjhp->bhps", passed[:, -1], B, dt, x)
    if initial_states is not None:
        first = decay.exp() * (numbers == 0)[..., None]
        y = y + torch.einsum("bih,bihs,bhps->bihp", first, C, initial_states)
        last = last + first[:, -1, :, None, None] * initial_states
    y = y if z is None else y * F.silu(z)
    return (y, last) if return_final_states else y


@_called_as("mamba_split_conv1d_scan_combined")
def scan(
    zxbcdt, weight, bias, dt_bias, a, *,
    D, headdim, ngroups, seq_idx = None,
    **ignored,
):  # fmt: skip
    """As `mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined`, [b, n, z x B C dt]
    to [b, n, heads * headdim]: a convolution of x, B and C, which begins anew with each document,
    and `chunk_scan`.
    """
    heads = a.numel()
    inner = heads * headdim
    z, xbc, dt = zxbcdt.split([inner, weight.shape[0], heads], -1)
    numbers = torch.zeros(zxbcdt.shape[:2]) if seq_idx is None else seq_idx
    xbc = F.silu(_convolved(xbc, weight, _together(numbers)) + bias)
    x, keys, queries = xbc.split([inner, *[(weight.shape[0] - inner) // 2] * 2], -1)
    z, x = (part.unflatten(-1, (heads, headdim)) for part in (z, x))
    keys, queries = (part.unflatten(-1, (ngroups, -1)) for part in (keys, queries))
    y = chunk_scan(
        x, dt, a, keys, queries, chunk_size=None, D=D, z=z, dt_bias=dt_bias, dt_softplus=True,
        seq_idx=seq_idx,
    )  # fmt: skip
    return y.flatten(2)


def _together(documents):
    """Whether token j is in the document of token i, and not after it: bool [b, n, n], of the
    documents' numbers [b, n].
    """
    n = documents.shape[1]
    return (documents[:, :, None] == documents[:, None]) & torch.ones(n, n, dtype=torch.bool).tril()


def _convolved(x, weight, together):
    """The causal convolution of each channel of x [b, n, d] with weight [d, width], inside of
    documents.
    """
    n, width = x.shape[1], weight.shape[1]
    out = x * weight[:, -1]
    for back in range(1, min(width, n)):
        inside = together.diagonal(-back, 1, 2)[..., None]  # [b, n - back, 1]
        out = out + F.pad(x[:, : n - back] * inside, (0, 0, back, 0)) * weight[:, width - 1 - back]
    return out


def _numbers(cu_seqlens, x):
    if cu_seqlens is None:
        return torch.zeros(x.shape[:2])
    assert x.shape[0] == 1 and cu_seqlens[-1] == x.shape[1], "documents must lie in one batch row"
    return torch.bucketize(torch.arange(x.shape[1]), cu_seqlens.long(), right=True)[None]


@_called_as("causal_conv1d")
def causal_conv1d(x, weight, bias=None, activation="", cu_seqlens=None, **ignored):
    """As `fla.modules.convolution.causal_conv1d`: x [b, n, d], weight [d, width]."""
    assert activation == "silu"
    out = _convolved(x, weight, _together(_numbers(cu_seqlens, x)))
    return F.silu(out if bias is None else out + bias), None


def l2norm(x):
    """As `fla.modules.l2norm.l2norm`."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@_called_as("chunk_gated_delta_rule", "chunk_gdn2")
def delta_rule(
    q, k, v, *,
    g, beta=None, b=None, w=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    **ignored,
):  # fmt: skip
    """As `fla.ops.gated_delta_rule.chunk_gated_delta_rule`: q, k, v [b, n, heads, d], g and beta
    [b, n, heads]; as `fla.ops.kda.chunk_kda`, with g of each channel of k; as
    `fla.ops.gdn2.chunk.chunk_gdn2`: g and b of each channel of k, w of v. For products of rules, k
    and v are [b, n, rules, heads, d].

    Token by token: the state decays by exp(g); then, for each rule, it forgets what it holds at k
    as far as b says, and learns v there as far as w says; both are beta.
    """
    if beta is not None:
        b, w = beta[..., None], beta[..., None]
    g = g if g.dim() == q.dim() else g[..., None]
    k, v, b, w = (x if x.dim() > q.dim() else x[:, :, None] for x in (k, v, b, w))
    ends = [q.shape[1]] if cu_seqlens is None else cu_seqlens[1:].tolist()
    assert cu_seqlens is None or (q.shape[0] == 1 and ends[-1] == q.shape[1])
    shape = q.shape[0] * len(ends), q.shape[2], k.shape[-1], v.shape[-1]
    first = q.new_zeros(shape) if initial_state is None else initial_state
    assert first.shape == shape, f"{tuple(first.shape)} states for {shape}"
    states, finals = [], []
    rows = (x.unbind(1) for x in (g[..., None].exp(), k[..., None], (b * k)[..., None], w * v))
    for i, (decay, *rules) in enumerate(zip(*rows, strict=True)):
        if i == 0 or i == ends[len(finals) - 1]:
            state = first if cu_seqlens is None else first[len(finals)][None]
        state = state * decay
        for key, forgets, learns in zip(*(x.unbind(1) for x in rules), strict=True):
            state = state + key * (learns - (forgets * state).sum(-2))[..., None, :]
        states.append(state)
        if i + 1 == ends[len(finals)]:
            finals.append(state)
    out = torch.einsum("bnhk,bnhkv->bnhv", q * q.shape[-1] ** -0.5, torch.stack(states, 1))
    return out, torch.cat(finals) if output_final_state else None


@_called_as("chunk_gated_delta_product")
def delta_product(q, k, v, *, g, beta, num_householder, **named):
    """As `fla.ops.gated_delta_product.chunk_gated_delta_product`: the rules of a token lie one after
    another, k and v [b, n * rules, heads, d].
    """
    k, v, beta = (x.unflatten(1, (-1, num_householder)) for x in (k, v, beta))
    return delta_rule(q, k, v, g=g, beta=beta, **named)


@_called_as("chunk_kda")
def kimi_rule(q, k, v, *, g, beta, A_log, dt_bias, use_gate_in_kernel, lower_bound, **named):
    """As `fla.ops.kda.chunk_kda`, which makes the decay of each channel of g."""
    assert use_gate_in_kernel
    raw, rate = g + dt_bias.view(g.shape[2:]), A_log.exp()[:, None]
    g = -rate * F.softplus(raw) if lower_bound is None else lower_bound * (rate * raw).sigmoid()
    named.pop("safe_gate")
    return delta_rule(q, k, v, g=g, beta=beta, **named)
