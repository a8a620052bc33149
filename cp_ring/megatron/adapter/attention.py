"""Ring attention with the interface of Megatron's core attention.

Shapes: s tokens of this rank, b microbatch, h query and g key/value heads of this tensor-parallel
rank, d and dv head sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, override

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch._compile import _disable_dynamo

from cp_ring.attention import AnyPlan, attention_of
from cp_ring.comm.groups import transport_for
from cp_ring.errors import ConfigError, KernelError
from cp_ring.inputs import AttentionOptions, Inputs
from cp_ring.megatron.adapter import compat, recomputation
from cp_ring.megatron.adapter.config import RingConfig
from cp_ring.megatron.adapter.layer_offload import saving
from cp_ring.megatron.adapter.planned import PlannedAttention, mask_of
from cp_ring.megatron.wrapping import Function, replaced
from cp_ring.observe import debug, timing, watchdog
from cp_ring.plan.sizes.attention_sizes import WIRES

if TYPE_CHECKING:
    from cp_ring.comm.latent import Latents
    from cp_ring.megatron.adapter.latent_tap import LatentTap


class RingDotProductAttention(PlannedAttention):
    """Core attention over the context-parallel group. Each rank holds s of the n = s * cp tokens;
    the layout in force says which.

    The arguments are those that Megatron gives to core attention, and `ring`, which a specification
    may set; the default is the configuration in force (see `RingConfig`).
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
    # Converters of weights that know stock attention by its class name, such as Megatron Bridge's,
    # read here how `softmax_offset` is split over tensor-parallel ranks.
    tensor_model_parallel = True
    partition_dim = 0

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
        ring: RingConfig | None = None,
        **unknown: Any,
    ) -> None:
        given = {name: x for name, x in locals().items() if x is not None}  # arguments
        given.pop("self")  # which would keep the layer alive
        super().__init__(
            config, layer_number, attn_mask_type, attention_type, cp_comm_type, pg_collection, ring
        )
        self.name: int | str = self.layer_number  # in messages
        self._stock_layer: list[Any] = []
        self._stock_settings = given
        self.softmax_scale = (
            1.0 / math.sqrt(k_channels or config.kv_channels)
            if softmax_scale is None
            else softmax_scale
        )
        # [h]; Megatron's clip_qk reads and resets it after a step
        self.current_max_attn_logits: torch.Tensor | None = None
        watchdog.start(self.ring.hop_timeout)
        if self.ring.debug:
            debug.switch_on()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ConfigError(
                f"--cp-ring does not support attention dropout {dropout}, which no GPU kernel has "
                "for tiles: give --attention-dropout 0 (attention_dropout=0.0)"
            )
        self.options = self._make_options()
        self.tap: LatentTap | None = None
        if WIRES[self.options.wire].latent:
            from cp_ring.megatron.adapter import latent_tap

            latent_tap.check_latent(config, self.spec.ulysses, self.ring)
            self.tap = latent_tap.LatentTap(self.tp_group)
        self._make_softmax_offset()
        self.register_load_state_dict_pre_hook(_without_extra_state)
        _check_known("core attention arguments", unknown)

    def _make_options(self) -> AttentionOptions:
        """Return the options that all calls of this layer have in common."""
        # Without Megatron's command line, nothing has chosen a codec for `auto`.
        plain = self.ring.wire == "auto" or self.cp_group.size() == 1
        return AttentionOptions(
            softmax_scale=self.softmax_scale,
            kernel=self.ring.kernel,
            num_slots=self.ring.num_slots,
            wire="plain" if plain else self.ring.wire,
            wire_dtype=self.ring.wire_dtype,
            qkv_format="sbhd",
            compare_every=self.ring.compare_every,
            max_logit=self.config.qk_clip or self.config.log_max_attention_logit,
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
        """Compute the attention of this rank's queries to the keys of every rank.

        Args:
            query: [s, b, h, d], or [s, h, d] for packed documents (thd).
            key: [s, b, g, d] or [s, g, d]. If there are more keys than queries, as in generation,
                Megatron's stock attention computes the call.
            value: [s, b, g, dv] or [s, g, dv].
            attention_mask: None, or a tensor that equals the causal mask of this rank's tokens, if
                the layer is causal (see `batch_mask`).
            attn_mask_type: `causal` or `no_mask`, as Megatron's enum or its name; packed documents
                may also have the types with padding. The default is the layer's type.
            packed_seq_params: the documents of the batch, or None for sequences without documents.
                If it has a `cp_group`, or `local_cp_size` 1, the tokens are split over those ranks
                only.

        Returns:
            [s, b, h * dv], or [s, h * dv] for packed documents, in the dtype of `query`; zero for
            padding tokens.

        Raises:
            ConfigError: for another mask, a bias, or packed sequences that ring attention does not
                support.
        """
        if key.shape[0] != query.shape[0]:
            return self._stock()(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=attn_mask_type,
                packed_seq_params=packed_seq_params,
            )
        packed = query.dim() == 3
        mask = mask_of(self.attn_mask_type if attn_mask_type is None else attn_mask_type, packed)
        if attention_bias is not None:
            raise ConfigError(
                "--cp-ring does not support an attention bias: leave attention_bias out"
            )
        _check_known("inputs", unknown)
        latents: Latents | None = None
        if self.tap is not None:
            latents = self.tap.take(self.config.qk_head_dim, self.config.v_head_dim)
        group, packed_seq_params = self.shared_by(query, packed_seq_params)
        if packed:  # documents lie end to end; Megatron has no batch dimension
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            latents = latents and latents._replace(latent=latents.latent.unsqueeze(1))
        step = compat.training_step()
        timing.at_step(step)
        plan = self.plan_of(query, mask, packed_seq_params)
        if attention_mask is not None:
            self.check_batch_mask(attention_mask, mask, plan)
        inputs = Inputs(query, key, value, self.softmax_offset, latents).alike()
        out = self._attend(plan, group, inputs, step).flatten(2)
        return out.squeeze(1) if packed else out

    def _attend(self, plan: AnyPlan, group: Any, inputs: Inputs, step: int) -> torch.Tensor:
        """Return the output [s, b, h, dv] of the ring, or what the forward pass that is being
        recomputed has kept of it; take note of its largest logits.
        """
        block = recomputation.current()
        kept = block.take(self) if block else None
        if kept is None:  # otherwise this is a recomputation of a call that the watchdog knows
            watchdog.enter(self.name, step)
        with (
            _flag_in_errors(self.options.kernel),
            saving([self.softmax_offset, *(inputs.latents or ())], self.config),
        ):
            transport = transport_for(group, inputs.q.device) if plan.cp > 1 else None
            output = attention_of(plan, transport, self.options, inputs)(inputs, kept)
        if block is not None:
            block.keep(self, output)
        if output.max_logit is not None:
            before = self.current_max_attn_logits
            self.current_max_attn_logits = (
                output.max_logit if before is None else torch.maximum(before, output.max_logit)
            )
        return output.out

    def _stock(self) -> Any:
        """Return Megatron's own core attention with the settings and the `softmax_offset` of this
        layer. It is not a submodule, so checkpoints do not change.
        """
        if not self._stock_layer:
            from megatron.core.extensions import transformer_engine
            from megatron.core.transformer.dot_product_attention import DotProductAttention

            with_te = self.config.transformer_impl == "transformer_engine"
            Stock = (
                transformer_engine.TEDotProductAttention
                if with_te and transformer_engine.HAVE_TE
                else DotProductAttention
            )
            # drawing a new parameter would advance the random state of training
            with replaced((self.config, "perform_initialization", False)):
                stock = Stock(**compat.known_arguments(Stock, self._stock_settings))
            self._stock_layer.append(stock)
        (stock,) = self._stock_layer
        if self.softmax_offset is not None:
            stock.softmax_offset = self.softmax_offset
        return stock.train(self.training)

    def _make_softmax_offset(self) -> None:
        """Set `softmax_offset` [h] to None, a constant, or a parameter."""
        config = self.config
        kind = config.softmax_type
        if kind == "vanilla":
            self.softmax_offset = None
            return
        options = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        heads = config.num_attention_heads // self.tp_group.size()
        if kind == "off-by-one":
            # This constant is neither a parameter nor a part of checkpoints.
            self.register_buffer("softmax_offset", torch.zeros(heads, **options), persistent=False)
            return
        # Draw values for the heads of all tensor-parallel ranks, so that a head starts with the
        # same value at any tensor-parallel size.
        offset = torch.empty(config.num_attention_heads, **options)
        if config.perform_initialization:
            config.init_method(offset)
        offset = offset.narrow(0, self.tp_group.rank() * heads, heads).clone()
        self.softmax_offset = torch.nn.Parameter(offset)
        # Each tensor-parallel rank has other heads: the gradient norm must count them all.
        set_tensor_model_parallel_attributes(self.softmax_offset, True, dim=0, stride=1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: Any = None,
    ) -> dict[str, Any]:
        """Return the state of the stock core attention that this layer replaces: `softmax_offset`,
        if it is learned, split over tensor-parallel ranks.

        With TransformerEngine, such a layer also has an extra state, which is empty without fp8.
        """
        state = self.state_dict(prefix="", keep_vars=True)
        if state and self.config.transformer_impl == "transformer_engine":
            state["_extra_state"] = torch.empty(0, dtype=torch.uint8)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def numbered(constructor: Function, prediction: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the constructor of a layer of multi-token prediction: name the attention layers inside
    it. Megatron gives them the numbers of decoder layers, and messages must tell the two apart.
    """
    constructor(prediction, *args, **kwargs)
    layers = [
        module for module in prediction.modules() if isinstance(module, RingDotProductAttention)
    ]
    for index, layer in enumerate(layers):
        number = f".{index + 1}" if len(layers) > 1 else ""
        layer.name = f"MTP {prediction.layer_number}{number}"


def _without_extra_state(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Drop the extra state that TransformerEngine's attention keeps for fp8."""
    state.pop(prefix + "_extra_state", None)


def _check_known(what: str, unknown: dict[str, Any]) -> None:
    if any(value is not None for value in unknown.values()):
        raise ConfigError(
            f"ring attention does not know these {what}: {', '.join(unknown)}: leave them out"
        )


@contextmanager
def _flag_in_errors(kernel: str) -> Iterator[None]:
    """Make kernel errors name the flag, not the parameter of `ring_attention`."""
    try:
        yield
    except KernelError as error:
        raise KernelError(
            str(error).replace(f"kernel={kernel!r}", f"--cp-ring-kernel {kernel}")
        ) from None
