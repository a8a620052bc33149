"""Ring attention with the interface of Megatron's core attention.

Shapes: s tokens of this rank, b microbatch, h query and g key/value heads of this tensor-parallel
rank, d and dv head sizes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, override

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch._compile import _disable_dynamo
from torch.distributed import get_process_group_ranks
from torch.nn.modules.module import register_module_module_registration_hook

from cp_ring.attention import AnyPlan, attention_of
from cp_ring.errors import ConfigError, KernelError
from cp_ring.inputs import AttentionOptions, Inputs
from cp_ring.megatron import compat
from cp_ring.megatron.data.batch_mask import accept_causal
from cp_ring.megatron.data.documents import (
    ALONE,
    documents_of,
    group_of_microbatch,
    without_whole_rows,
)
from cp_ring.megatron.data.prefetch import wait_for
from cp_ring.megatron.flags import graphs
from cp_ring.megatron.flags.attention_rules import check_layer, check_window
from cp_ring.megatron.flags.codec_choice import check_latent
from cp_ring.megatron.flags.comm_types import check_members, spec_of_layer
from cp_ring.megatron.flags.rule import Job, check_rules
from cp_ring.megatron.flags.rules import SUBGROUP
from cp_ring.megatron.layers import recomputation
from cp_ring.megatron.layers.dropout_keys import dropout_of, number_of_prediction
from cp_ring.megatron.layers.layer_offload import offload, saving
from cp_ring.megatron.plans import make_layout, make_plan, plan_of_last
from cp_ring.megatron.settings import current, packed_in_whole_rows
from cp_ring.observe import debug, timing, watchdog
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.sizes.attention_sizes import WIRES

if TYPE_CHECKING:
    from cp_ring.kernels.dropout import Dropout
    from cp_ring.megatron.layers.latent_tap import LatentTap

# with the padding that packed documents tell
_PADDED = {"padding_causal": "causal", "padding": "no_mask"}


class RingDotProductAttention(MegatronModule):
    """Core attention over the context-parallel group: each rank holds s of the n = s * cp tokens,
    split by the layout in force.

    The arguments are those that Megatron gives to core attention.
    `config.apply_query_key_layer_scaling` has no effect: stock attention divides and multiplies the
    scores by the layer number to fit fp16, while ring attention keeps them in float32.

    A layer whose `config.context_parallel_size` is 1, such as that of a vision encoder, attends to
    this rank's own tokens alone, however many ranks the group has.

    A layer's window (`config.window_size`, `config.window_attn_skip_freq`) narrows its mask.
    `config.softmax_type` adds a term to the softmax denominator of each head: exp(0) for
    `off-by-one`, exp of the parameter `softmax_offset` [h] for `learnable`.

    Raises `ConfigError` for arguments and settings that ring attention does not support.
    """

    softmax_offset: torch.Tensor | None
    # Whether positions follow the group of a microbatch, for which the patch core_attention sees.
    positions_by_group = False
    cache: Any = None  # while `cp_ring.megatron.generate` runs
    # How `softmax_offset` is split over tensor-parallel ranks, for converters of weights that know
    # stock attention by name, as Megatron Bridge's.
    tensor_model_parallel, partition_dim = True, 0

    @override
    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = max(1, layer_number)
        self.dropout_number, self.calls = self.layer_number, 1
        self.name: int | str = self.layer_number  # in messages
        self.attn_mask_type = attn_mask_type
        cp = getattr(config, "context_parallel_size", 1)
        self.cp_group = ALONE if cp == 1 else compat.group_of(pg_collection, "cp")
        if self.cp_group.size() != cp:
            raise ConfigError(
                f"layer {layer_number}: its configuration has context_parallel_size {cp}, but its "
                f"context-parallel group, by default Megatron's, has {self.cp_group.size()} ranks: "
                "change it, or give the model a pg_collection with a group cp of as many ranks"
            )
        self.tp_group = compat.group_of(pg_collection, "tp")
        self.softmax_scale = (
            1.0 / math.sqrt(k_channels or config.kv_channels)
            if softmax_scale is None
            else softmax_scale
        )
        # [h]; Megatron's clip_qk reads it after a step, and resets it
        self.current_max_attn_logits: torch.Tensor | None = None
        self.settings = current()
        watchdog.start(self.settings.hop_timeout)
        if graphs.hold_attention(config):
            watchdog.WATCH.asks_device = False
        if self.settings.debug:
            debug.switch_on()
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        check_layer(config, layer_number, attention_type)
        self.cp_comm_type = cp_comm_type
        self.spec = self._spec_on(self.cp_group)
        self._specs: dict[Any, PlanSpec] = {}  # of groups of single microbatches
        # Without Megatron's command line, nothing has chosen for auto.
        self.wire = (
            "plain"
            if self.settings.wire == "auto" or self.cp_group.size() == 1
            else self.settings.wire
        )
        self.options = AttentionOptions(
            softmax_scale=self.softmax_scale, kernel=self.settings.kernel,
            num_slots=self.settings.num_slots, compute_streams=self.settings.compute_streams,
            wire=self.wire, wire_dtype=self.settings.wire_dtype, qkv_format="sbhd",
            compare_every=self.settings.compare_every,
            max_logit=any(getattr(config, x, 0) for x in ("qk_clip", "log_max_attention_logit")),
        )  # fmt: skip
        self.tap = self._make_tap()
        self.window = _window(config, layer_number, _check_mask(attn_mask_type))
        self._make_softmax_offset()
        self.register_load_state_dict_pre_hook(_without_extra_state)
        if any(value is not None for value in unknown.values()):
            raise ConfigError(
                f"ring attention does not know these core attention arguments: {', '.join(unknown)}"
            )

    @_disable_dynamo  # see `ring_attention`
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """Attention of this rank's queries to every rank's keys.

        Args:
            query: [s, b, h, d], or [s, h, d] of packed documents (thd).
            key: [s, b, g, d] or [s, g, d]. More keys than queries are those of earlier tokens
            too, as in generation; then the mask type is that of the layer.
            value: [s, b, g, dv] or [s, g, dv].
            attention_mask: None, or the causal mask of this rank's tokens where that is the
            declared one (see `batch_mask`).
            attn_mask_type: `causal` or `no_mask`, of packed documents also with padding, as
            Megatron's enum or its name; by default that of the layer.
            packed_seq_params: the documents of the batch; None for sequences without documents.
            Those with a `cp_group`, or with `local_cp_size` 1, are split over these ranks alone.

        Returns:
            [s, b, h * dv], or [s, h * dv] of packed documents, in the dtype of `query`; zero where
            a token is padding.

        Raises:
            ConfigError: for another mask, a bias, or packed sequences that ring attention does not
            support.
        """
        cached = key.shape[0] - query.shape[0]
        mask = _check_mask(
            self.attn_mask_type if attn_mask_type is None or cached else attn_mask_type,
            packed=query.dim() == 3,
        )
        _check_inputs(attention_bias, unknown)
        latents = (
            None
            if self.tap is None
            else self.tap.take(self.config.qk_head_dim, self.config.v_head_dim)
        )
        if self.cache is not None and self.cache.position is not None:
            generated: torch.Tensor = self.cache.attend(self, query, key, value)
            return generated
        if self.cache is not None:
            self.cache.keep(self, key, value)
        # thd: the documents lie end to end, and Megatron has no batch dimension
        packed = query.dim() == 3
        group = group_of_microbatch(packed_seq_params, self.cp_group)
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            latents = latents and latents._replace(latent=latents.latent.unsqueeze(1))
        elif group is not self.cp_group:
            raise ConfigError(
                "packed_seq_params.cp_group or local_cp_size is for fewer ranks than the model's: "
                "only packed documents (thd) can be split so"
            )
        else:
            packed_seq_params = without_whole_rows(packed_seq_params, query.shape[0] * group.size())
        if attention_mask is not None:
            self._check_batch_mask(
                attention_mask, mask, query.shape[0], key.shape[0], packed_seq_params
            )
        step = compat.training_step()
        timing.at_step(step)
        plan = self.plan_of(query, mask, packed_seq_params, cached)
        dropout = (
            self._dropout(query, packed_seq_params) if self.dropout and self.training else None
        )
        kept = recomputation.take(self)
        if kept is None:  # else the watchdog knows the call as the one whose output was kept
            watchdog.enter(self.name, step)
        inputs = Inputs(query, key, value, self.softmax_offset, latents, dropout).alike()
        with (
            _flag_in_errors(self.options.kernel),
            saving([self.softmax_offset, *(latents or ())], self.config),
        ):
            output = attention_of(plan, group if plan.cp > 1 else None, self.options, inputs)(
                inputs, kept
            )
        recomputation.keep(self, output, offload() if self.settings.offload else None)
        if output.max_logit is not None:  # Megatron's clipping and log read it
            before = self.current_max_attn_logits
            self.current_max_attn_logits = (
                output.max_logit if before is None else torch.maximum(before, output.max_logit)
            )
        out = output.out.flatten(2)
        return out.squeeze(1) if packed else out

    def _make_tap(self) -> LatentTap | None:
        """What finds the latents of this layer, where they travel; see
        `cp_ring.megatron.layers.latent_tap.link`.
        """
        if not WIRES[self.wire].latent:
            return None
        check_latent(self.config, self.spec.ulysses, self.settings)
        from cp_ring.megatron.layers.latent_tap import LatentTap

        return LatentTap(self.tp_group)

    def plan_of(
        self, query: torch.Tensor, mask: str, packed_seq_params: Any, cached: int = 0
    ) -> AnyPlan:
        """The plan for queries [s, b, h, d] under the mask type `mask` and, where there are any,
        the documents of the batch, or the `cached` keys of earlier tokens.
        """
        group = group_of_microbatch(packed_seq_params, self.cp_group)
        rank, cp, (tokens, batch) = group.rank(), group.size(), query.shape[:2]
        if packed_seq_params is None:
            if cached and cp == 1:
                return plan_of_last(mask, tokens + cached, tokens, self.window)
            return make_plan(mask, tokens * cp, cp, self.window, self.spec)
        documents = documents_of(packed_seq_params, tokens * batch, cp, packed_in_whole_rows())
        with timing.waiting_for_plan():
            return wait_for(
                documents.prepare(rank, self.window, mask == "causal", self._spec_of(group))
            )

    def _spec_of(self, group: Any) -> PlanSpec:
        """How attention is split over all context-parallel ranks, or those of one microbatch."""
        if group is self.cp_group:
            return self.spec
        if group not in self._specs:
            found = {**vars(self.config), "positions_by_group": self.positions_by_group}
            check_rules(Job(argparse.Namespace(**found), self.settings), SUBGROUP)
            self._specs[group] = self._spec_on(group)
        return self._specs[group]

    def _spec_on(self, group: Any) -> PlanSpec:
        kind, cp, heads = self.cp_comm_type, group.size(), self.config.num_attention_heads
        sizes = getattr(self.config, "hierarchical_context_parallel_sizes", None)
        ranks = get_process_group_ranks(group) if cp > 1 else None
        spec = spec_of_layer(kind, self.settings, cp, sizes, ranks)
        check_members(kind, spec, self.settings, cp, heads, self.tp_group.size())
        return spec

    def _dropout(self, query: torch.Tensor, packed_seq_params: Any) -> Dropout:
        """The dropout of this microbatch, for queries [s, b, h, d], by the places of its tokens in
        their batch rows.
        """
        group = group_of_microbatch(packed_seq_params, self.cp_group)
        rank, cp, (tokens, batch, heads) = group.rank(), group.size(), query.shape[:3]
        if packed_seq_params is None:
            layout = make_layout(self.settings.layout, tokens * cp, cp)
            places = torch.from_numpy(layout.positions(rank)) if cp > 1 else torch.arange(tokens)
        else:
            places = documents_of(
                packed_seq_params, tokens * batch, cp, packed_in_whole_rows()
            ).places(rank)
        return dropout_of(
            self.dropout, self.dropout_number, places, self.tp_group.rank() * heads, self.calls
        )

    def _check_batch_mask(
        self,
        attention_mask: torch.Tensor,
        mask: str,
        queries: int,
        tokens: int,
        packed_seq_params: Any,
    ) -> None:
        """Accepts a mask tensor where it is the declared causal mask of the last `queries` of the
        `tokens` of this rank; else raises `ConfigError`.
        """
        if packed_seq_params is not None or mask != "causal":
            declared = "the documents" if packed_seq_params is not None else f"the mask type {mask}"
            raise ConfigError(
                f"the batch holds an attention mask beside {declared}, which ring attention "
                "computes itself: give --no-create-attention-mask-in-dataloader"
            )
        cp = self.cp_group.size()
        layout = make_layout(self.settings.layout, tokens * cp, cp)
        accept_causal(attention_mask, layout, self.cp_group.rank(), queries)

    def _make_softmax_offset(self) -> None:
        """Sets `softmax_offset` [h]: None, a constant, or a parameter."""
        kind, config = getattr(self.config, "softmax_type", "vanilla"), self.config
        if kind == "vanilla":
            self.softmax_offset = None
            return
        options = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        heads = config.num_attention_heads // self.tp_group.size()
        if kind == "off-by-one":
            # It is neither a parameter nor part of checkpoints.
            self.register_buffer("softmax_offset", torch.zeros(heads, **options), persistent=False)
            return
        # Drawn for the heads of all tensor-parallel ranks, so that a head starts with the same
        # value at any tensor-parallel size.
        offset = torch.empty(config.num_attention_heads, **options)
        if config.perform_initialization:
            config.init_method(offset)
        offset = offset.narrow(0, self.tp_group.rank() * heads, heads).clone()
        self.softmax_offset = torch.nn.Parameter(offset)
        # Each tensor-parallel rank has other heads: the gradient norm must count them all.
        compat.mark_tensor_parallel(self.softmax_offset, dim=0)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The state of the stock core attention that it replaces: `softmax_offset`, if learned,
        split over tensor-parallel ranks.

        With TransformerEngine there is then also an extra state, which is empty without fp8.
        """
        state = self.state_dict(prefix="", keep_vars=True)
        if state and getattr(self.config, "transformer_impl", "") == "transformer_engine":
            state["_extra_state"] = torch.empty(0, dtype=torch.uint8)
        return compat.sharded_tensors(
            state, prefix, {"softmax_offset": 0}, sharded_offsets, self.tp_group, metadata
        )


def _number_predictions(parent: Any, _: str, child: Any) -> None:
    """Tells the attention layers inside a layer of multi-token prediction from the decoder's, whose
    numbers they have too.

    Core attention is built without a word about it, so it learns it where its layer becomes a part
    of the prediction.
    """
    if isinstance(parent, MultiTokenPredictionLayer) and child is not None:
        layers = [
            module for module in child.modules() if isinstance(module, RingDotProductAttention)
        ]
        calls = (
            parent.config.mtp_num_layers
            if getattr(parent.config, "mtp_use_repeated_layer", False)
            else 1
        )
        for index, layer in enumerate(layers):
            layer.dropout_number, layer.calls = (
                number_of_prediction(parent.layer_number, index),
                calls,
            )
            layer.name = f"MTP {parent.layer_number}" + (f".{index + 1}" if len(layers) > 1 else "")


register_module_module_registration_hook(_number_predictions)


def _without_extra_state(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Ignores the state that TransformerEngine's attention keeps for fp8."""
    state.pop(prefix + "_extra_state", None)


def _check_inputs(attention_bias: Any, unknown: dict[str, Any]) -> None:
    if attention_bias is not None:
        raise ConfigError("--cp-ring does not support an attention bias")
    if any(value is not None for value in unknown.values()):
        raise ConfigError(f"ring attention does not know these inputs: {', '.join(unknown)}")


@contextmanager
def _flag_in_errors(kernel: str) -> Iterator[None]:
    """Errors of a kernel name the flag, not the parameter of `ring_attention`."""
    try:
        yield
    except KernelError as error:
        raise KernelError(
            str(error).replace(f"kernel={kernel!r}", f"--cp-ring-kernel {kernel}")
        ) from None


def _check_mask(mask_type: Any, packed: bool = True) -> str:
    name = str(getattr(mask_type, "name", mask_type))
    name = _PADDED.get(name, name) if packed else name
    if name not in ("causal", "no_mask"):
        raise ConfigError(
            f"--cp-ring supports the attention mask types causal and no_mask, not {name}"
        )
    return name


def _window(config: Any, layer_number: int, mask: str) -> tuple[int, int]:
    """The numbers of keys before and after its own position that a query of this layer sees; -1 is
    all.

    Raises `ConfigError` if the window contradicts the mask, or the configuration does not say
    whether this layer has it.
    """
    window = config.window_size
    frequency = config.window_attn_skip_freq
    if window is None:
        return -1, -1
    check_window(window, causal=mask == "causal")
    if isinstance(frequency, list) and layer_number > len(frequency):
        raise ConfigError(
            f"--window-attn-skip-freq has {len(frequency)} entries, but there is a layer "
            f"{layer_number}"
        )
    if not compat.has_window(config, layer_number):
        return -1, -1
    return int(window[0]), int(window[1])
