"""Hugging Face transformers' language models, and its Trainer, under context parallelism: ring
attention replaces their attention, and each rank gets its tokens of a batch.

Shapes: b batch rows of n tokens; h query and g key/value heads of sizes d and e; cp ranks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, Trainer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from cp_ring.api import ring_attention
from cp_ring.comm.groups import Group, check_given, transport_for, transport_of_call
from cp_ring.comm.same_batch import check_same_batch
from cp_ring.errors import ConfigError
from cp_ring.sharding import parts_of, unshard

OFFSETS = "cp_ring_offsets"
"""A key that `shard_batch` adds to a batch and the models hand to attention: the offsets of
documents in the whole batch row, (0, ..., n).
"""

LAST = "cp_ring_last_position"
"""Another key that `shard_batch` adds: the largest position of the whole batch, a tensor []. Rotary
embeddings whose frequencies follow the length of the batch ask for it.
"""

COUNTED = "cp_ring_counted"
"""Another key that `shard_batch` adds: which tokens of the whole batch are no padding, a tensor
[b, n]. Balance losses of experts ask for it.
"""

_OPTIONS = (
    "route",
    "schedule",
    "heads",
    "deterministic",
    "kernel",
    "num_slots",
    "wire",
    "wire_dtype",
    "timeout",
)
"""Keywords of `ring_attention` that neither the layers of a model nor `shard_batch` settle."""

_NOT_OF_TRAINER = ("neftune_noise_alpha", "use_liger_kernel", "parallelism_config", "deepspeed")
_KINDS = {"full_attention", "sliding_attention"}
_IGNORED = -100  # the label of tokens without a loss


def use_ring_attention(model: PreTrainedModel, group: Group = None, **options: Any) -> None:
    """Replace the attention of all layers of `model` by ring attention over the ranks of `group`.

        use_ring_attention(model, group)
        loss = model(**shard_batch(batch, group)).loss

    The windows, learned sinks and scales of its layers are kept. options: `route`, `schedule`,
    `heads`, `deterministic`, `kernel`, `num_slots`, `wire`, `wire_dtype` and `timeout` of
    `cp_ring.ring_attention`.

    It accepts models with a head for each token: causal language models, base models, token
    classification; with PEFT's adapters too. A head that pools a row, as for sequence
    classification, would pool only a rank's part of the row. A balance loss of experts
    (`output_router_logits`) is that of the whole batch.

    Raises `ConfigError` for other heads and layers, attention that transformers cannot replace, and
    other options.
    """
    check_given(group)
    _check_options(options)
    model = _unwrapped(model)
    config, name = model.config, type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if kinds or getattr(model, "_is_stateful", False):
        what = ", ".join(sorted(kinds)) or "layers with a state"
        raise ConfigError(f"{name} has {what}, which ring attention cannot split over ranks")
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in model.modules()):
        raise ConfigError(f"{name} counts positions from its padding token: give another model")
    if config.get_text_config() is not config or config.is_encoder_decoder:
        raise ConfigError(f"{name} reads more than one sequence of tokens: give a language model")
    # flash attention, as ring attention, has its mask from the layers and not from a tensor
    if not model._supports_attention_backend or not model._supports_flash_attn:
        raise ConfigError(f"{name} does not let transformers replace its attention")
    _check_head(model)
    model.register_forward_pre_hook(_check_inputs, with_kwargs=True)
    _balance_experts(model, group)
    implementation = f"cp_ring_{id(model):x}"
    AttentionInterface.register(implementation, partial(_attend, group, options))
    AttentionMaskInterface.register(implementation, _no_mask)
    model.set_attn_implementation(implementation)
    _tell_length(model)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a keyword that is not an option here."""
    for name, value in options.items():
        if name in _OPTIONS or (name == "layout" and value in (None, "zigzag")):
            continue
        why = "shard_batch and the layers of the model settle it"
        if name not in inspect.signature(ring_attention).parameters:
            why = f"there is no such option of ring_attention; known here are {', '.join(_OPTIONS)}"
        raise ConfigError(f"use_ring_attention does not take {name}={value!r:.40}: {why}")


def _unwrapped(model: Any) -> PreTrainedModel:
    """Return the transformers model inside of PEFT's adapters, or `model` itself. Raises
    `ConfigError` if there is no transformers model, or if an adapter adds learned tokens.
    """
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ConfigError(
            f"{type(model).__name__} puts learned tokens before those of each rank: take adapters "
            "of weights, such as LoRA"
        )
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if isinstance(model, PreTrainedModel):
        return model
    inside = ("module", "_orig_mod", "pretrained_model")
    names = [name for name in inside if isinstance(getattr(model, name, None), PreTrainedModel)]
    hint = f": give model.{names[0]}, before it is wrapped" if names else ""
    raise ConfigError(f"model is a {type(model).__name__}, not a PreTrainedModel{hint}")


def _check_head(model: PreTrainedModel) -> None:
    """Raise `ConfigError` for a model whose head does not treat each token by itself."""
    tables = MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    known: Any = tuple(table.get(type(model.config), ()) for table in tables)
    names = [kind.__name__ for kind in type(model).__mro__]
    if not isinstance(model, known) and not any(name.endswith(_HEADS) for name in names):
        raise ConfigError(
            f"{names[0]} has a head that may pool a row, but each rank holds a part of the row: "
            f"give the model inside of it, model.{model.base_model_prefix}, and pool "
            "cp_ring.unshard(hidden_states, group=group)"
        )


_HEADS = ("ForCausalLM", "ForTokenClassification")


def _check_inputs(model: nn.Module, _: Any, named: dict[str, Any]) -> None:
    """Raise `ConfigError` for inputs beside those of `shard_batch` that mean whole rows."""
    if OFFSETS not in named:
        return
    names = [kind.__name__ for kind in type(model).__mro__]
    if any(name.endswith(_HEADS[1]) for name in names) and named.get("labels") is not None:
        raise ConfigError(
            f"shard_batch shifts labels, which {names[0]} compares with their own tokens: leave "
            "labels out of the batch, and give cp_ring.shard(labels, group=group) to a loss of the "
            "logits"
        )
    if named.get("attention_mask") is not None:
        raise ConfigError("attention_mask has no effect after shard_batch: leave it in the batch")
    whole = named["position_ids"].shape[1] == named[OFFSETS][-1]  # at context parallel size 1
    if isinstance(kept := named.get("logits_to_keep", 0), Tensor) or (kept and not whole):
        raise ConfigError(
            "logits_to_keep would keep tokens of each rank's part: leave it out, and cut "
            "cp_ring.unshard(logits, group=group)"
        )


def _balance_experts(model: PreTrainedModel, group: Group) -> None:
    """Make the balance loss of experts that of the whole batch, without its padding: a product of
    means is no mean of the ranks' products.

    Raises `ConfigError` for a model that computes it in another way than most.
    """
    balance = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if balance is None:
        return
    asked = ["gate_logits", "num_experts", "top_k", "attention_mask"]
    usual = [*inspect.signature(balance).parameters] == asked and hasattr(
        model, "router_aux_loss_coef"
    )

    def of_all_ranks(_: nn.Module, __: Any, named: dict[str, Any], out: Any) -> None:
        found = getattr(out, "aux_loss", None)
        if OFFSETS not in named or found is None:
            return
        if not usual:
            raise ConfigError(problem)
        counted = named[COUNTED]
        rows, n = counted.shape
        # a sum, because the gradients of ranks are averaged
        logits = tuple(
            unshard(x.unflatten(0, (rows, -1)), group=group, reduction="sum")[:, :n].flatten(0, 1)
            for x in out.router_logits
        )
        of_all = balance(logits, model.num_experts, model.num_experts_per_tok, counted)
        if out.loss is not None:
            out.loss = out.loss + model.router_aux_loss_coef * (of_all - found)
        out.aux_loss = of_all

    problem = (
        f"{type(model).__name__} has a balance loss of experts, which ring attention does not "
        "know: set model.config.output_router_logits = False"
    )
    if not usual and getattr(model.config, "output_router_logits", False):
        raise ConfigError(problem)
    model.register_forward_hook(of_all_ranks, with_kwargs=True)


def _tell_length(model: PreTrainedModel) -> None:
    """Give the largest position of the whole batch to rotary embeddings whose frequencies follow
    it. The position goes into `position_ids` as one more token, which is taken off the result.
    """
    last: list[Tensor] = []

    def note(_: nn.Module, __: Any, named: dict[str, Any]) -> None:
        last[:] = [named[LAST]] if LAST in named else []

    def add(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not last:
            return None
        positions = named["position_ids"] if "position_ids" in named else args[1]
        longest = last[0].to(positions).expand(*positions.shape[:-1], 1)
        more = torch.cat([positions, longest], -1)
        if "position_ids" in named:
            return args, {**named, "position_ids": more}
        return (args[0], more, *args[2:]), named

    def remove(_: nn.Module, __: Any, rotations: Any) -> Any:
        return tree_map(lambda x: x[:, : x.shape[1] - len(last)], rotations)

    rotary = [part for part in model.modules() if _follows_length(part)]
    if rotary:
        model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    for part in rotary:
        part.register_forward_pre_hook(add, with_kwargs=True)
        part.register_forward_hook(remove)


def _follows_length(part: nn.Module) -> bool:
    """Return True for a rotary embedding whose frequencies follow the largest position."""
    kinds = getattr(part, "rope_type", None)
    names = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any("dynamic" in str(name) or name == "longrope" for name in names)


@_disable_dynamo
def shard_batch(batch: Mapping[str, Any], group: Group = None) -> dict[str, Any]:
    """Return this rank's tokens of a batch that all ranks of `group` hold, for a model after
    `use_ring_attention`.

        loss = model(**shard_batch(batch, group)).loss

    batch: `input_ids` [b, n] and optionally `labels`, `position_ids` and `attention_mask` [b, n],
    as transformers' collators make them. Labels are shifted here, before the split. If positions of
    a single batch row begin again at 0, a token sees only its own document
    (`DataCollatorWithFlattening`). An attention mask may hide padding at the end. Tokens without a
    loss are added at the end until n is a multiple of 2 * cp.

    The loss of a rank is cp times the sum over its tokens, divided by the number of labels of the
    whole batch, or by `num_items_in_batch`. So the average of the ranks' losses and gradients is
    that of the whole batch: DDP or FSDP over the same ranks takes it.

    Raises `ConfigError` for padding before tokens, for entries of another shape, and for a batch
    that is split already; `PlanError` on all ranks if they hold different batches.
    """
    tokens = _tokens_of(batch)
    batch = {name: x for name, x in batch.items() if x is not None}
    transport = transport_of_call(group, tokens.device)
    check_same_batch(transport, batch)
    cp, (batch_size, n) = transport.size if transport else 1, tokens.shape
    positions = batch.get("position_ids", torch.arange(n, device=tokens.device)[None])
    whole = {"input_ids": tokens, "position_ids": positions}
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    rest = {name: x for name, x in batch.items() if name not in {*whole, *_OF_THE_ROW, "labels"}}
    for name, x in (whole | {"labels": labels, "attention_mask": mask}).items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise ConfigError(f"{name} is a {type(x).__name__}: it must be a tensor [b, n]")
        if x.shape not in ((batch_size, n), (1, n)):
            raise ConfigError(
                f"{name} is {tuple(x.shape)}: it must be {(batch_size, n)} as input_ids"
            )
    if rest:
        raise ConfigError(f"shard_batch does not know how to split {', '.join(sorted(rest))}")
    if labels is not None:
        whole["labels"] = pad(labels[:, 1:], (0, 1), value=_IGNORED)
    _check_padding(mask)
    offsets, last = _offsets(positions, mask, batch_size), positions.max()
    labeled = batch.get("num_items_in_batch")
    more = -n % (2 * cp) if cp > 1 else 0
    if more:
        fill = {"labels": _IGNORED}
        whole = {name: pad(x, (0, more), value=fill.get(name, 0)) for name, x in whole.items()}
        offsets = (*offsets, n + more) if len(offsets) > 2 else (0, n + more)
    parts = {name: x if cp == 1 else parts_of(x, None, group, 1) for name, x in whole.items()}
    parts["position_ids"] = parts["position_ids"].expand(batch_size, -1)
    counted = torch.ones_like(tokens) if mask is None else mask.expand_as(tokens)
    parts |= {OFFSETS: offsets, LAST: last, COUNTED: counted, "use_cache": False}
    if "labels" in whole:
        total = (whole["labels"] != _IGNORED).sum() if labeled is None else labeled
        parts |= {"shift_labels": parts["labels"], "num_items_in_batch": total / cp}
    return parts


def _tokens_of(batch: Any) -> Tensor:
    """Return `input_ids` of a batch. Raises `ConfigError` if it has none."""
    if not isinstance(batch, Mapping):
        raise ConfigError(f"batch is a {type(batch).__name__}: give a dict with input_ids [b, n]")
    if OFFSETS in batch:
        raise ConfigError("the batch is split already: call shard_batch once, with the whole batch")
    tokens = batch.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        what = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        has = ", ".join(sorted(batch)) or "nothing"
        said = f"the batch has {has}" if tokens is None else f"input_ids is {what}"
        raise ConfigError(f"{said}: give input_ids, a tensor of tokens [b, n]")
    return tokens


_OF_THE_ROW = {
    "attention_mask",
    "num_items_in_batch",
    "use_cache",
    "return_dict",
    # made from the positions
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
}


def _check_padding(mask: Tensor | None) -> None:
    if mask is None:
        return
    if bool((mask > 1).any()):
        raise ConfigError(
            "attention_mask numbers documents: give position_ids that begin again at 0 with each, "
            "and leave attention_mask to padding"
        )
    if bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ConfigError(
            "attention_mask hides tokens before others: pad at the end (padding_side='right')"
        )


def _offsets(positions: Tensor, mask: Tensor | None, batch_size: int) -> tuple[int, ...]:
    """Return where the documents of the batch row begin, and its end. Positions of hidden tokens
    begin no document.
    """
    n = positions.shape[1]
    begin = positions[:, 1:] != positions[:, :-1] + 1
    starts = (begin if mask is None else begin & (mask[:, 1:] != 0)).nonzero()
    if not len(starts):
        return 0, n
    if batch_size > 1:
        raise ConfigError(
            "position_ids of several batch rows begin again: give packed documents as one batch "
            "row, or the attention_mask that hides padding"
        )
    return 0, *(starts[:, 1] + 1).tolist(), n


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> int | None:
    """Stands in for the function that makes a model's mask tensors. The window is in place of the
    tensor, because the layers of some models do not tell theirs.
    """
    return local_size


@_disable_dynamo  # see `ring_attention`
def _attend(
    group: Group,
    options: dict[str, Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Run ring attention for transformers: query [b, h, n / cp, d], key [b, g, n / cp, d] and value
    [b, g, n / cp, e] give [b, n / cp, h, e]. `attention_mask` is what `_no_mask` returned.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    offsets, transport = named.get(OFFSETS), transport_for(group, q.device)
    if offsets is None or offsets[-1] != q.shape[1] * (transport.size if transport else 1):
        raise ConfigError(
            "attention did not get the keywords of shard_batch: call model(**shard_batch(batch)), "
            "or model.set_attn_implementation('sdpa') for model.generate; if you did, the layers "
            f"around {type(module).__name__} do not pass keywords on, which ring attention needs"
        )
    causal = named.get("is_causal")
    if not (module.is_causal if causal is None else causal) or named.get("dropout"):
        raise ConfigError(
            f"{type(module).__name__} has attention dropout, or sees later tokens, which ring "
            "attention of transformers does not support"
        )
    if named.get("softcap"):
        raise ConfigError(
            f"{type(module).__name__} caps its scores (softcap), which ring attention does not "
            "support"
        )
    window = named.get("sliding_window") or attention_mask
    out = ring_attention(
        q,
        k,
        v,
        group,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, 0),
        cu_seqlens=offsets if len(offsets) > 2 else None,
        softmax_scale=named.get("scaling"),
        sink=named.get("s_aux"),
        **options,
    )
    return out, None


class RingTrainer(Trainer):
    """transformers' Trainer on groups of `context_parallel_size` neighboring ranks. The ranks of a
    group get the same batch, and each takes its tokens.

        trainer = RingTrainer(model, arguments, train_dataset=rows, context_parallel_size=2)

    Losses, gradients, evaluation and the order of rows are those of Trainer on as many ranks as
    there are groups. `compute_loss_func` gets logits [b, n, v] and labels [b, n] of whole rows,
    which every rank of a group computes; other outputs are of its own tokens. For another subclass
    of Trainer, put it first: `class RingSFTTrainer(RingTrainer, SFTTrainer)`.

    Raises `ConfigError` for what `use_ring_attention` rejects, and for arguments that it does not
    know under context parallelism.
    """

    def __init__(self, *args: Any, context_parallel_size: int, **named: Any) -> None:
        super().__init__(*args, **named)
        self._cp, world = context_parallel_size, self.args.world_size
        if self._cp < 1 or world % self._cp:
            raise ConfigError(f"context_parallel_size={self._cp} does not divide the {world} ranks")
        wrong = [name for name in _NOT_OF_TRAINER if getattr(self.args, name, None)]
        if getattr(self.args, "train_sampling_strategy", "") == "batch_rebalance":
            wrong.append("train_sampling_strategy='batch_rebalance'")
        if self._cp > 1 and wrong:
            raise ConfigError(f"RingTrainer does not support {', '.join(wrong)}: leave it out")
        self._mesh, self.group = None, None
        if world > 1:
            sizes, names = (world // self._cp, self._cp), ("dp_replicate", "cp")  # accelerate's
            self._mesh = init_device_mesh(self.args.device.type, sizes, mesh_dim_names=names)
            self.group = self._mesh["cp"].get_group()
            self.accelerator.gather = partial(self._of_first_ranks, self.accelerator.gather)
        model: Any = self.model
        use_ring_attention(model, self.group)
        self.model_accepts_loss_kwargs = True  # the models get them from shard_batch
        if smooth := self.label_smoother:

            def smoothed(
                outputs: Any, labels: Tensor, shift_labels: Any = None, **more: Any
            ) -> Any:
                return smooth(outputs, labels, **more)  # they are shifted already

            self.label_smoother: Any = smoothed
        if self.compute_loss_func is not None:
            self.compute_loss_func: Any = partial(self._of_whole_rows, self.compute_loss_func)

    def _get_dataloader(self, *args: Any, **named: Any) -> DataLoader:
        """Let accelerate deal rows over groups of ranks."""
        state = self.accelerator.state
        before, state.device_mesh = getattr(state, "device_mesh", None), self._mesh
        try:
            return super()._get_dataloader(*args, **named)
        finally:
            state.device_mesh = before

    def _of_first_ranks(self, gather: Callable[[Any], Any], tensors: Any) -> Any:
        """Gather tensors of all ranks, and keep those of the first rank of each group."""

        def keep(x: Tensor) -> Tensor:
            rows = len(x) // self.args.world_size
            return x.unflatten(0, (-1, self._cp, rows))[:, 0].flatten(0, 1)

        return tree_map(keep, gather(tensors))

    def _of_whole_rows(
        self, compute: Callable[..., Tensor], outputs: Any, labels: Any, num_items_in_batch: Any
    ) -> Tensor:
        """Call a user's loss function with logits and labels of whole rows."""
        n = self._inputs["input_ids"].shape[1]
        # a sum, because the gradients of ranks are averaged
        outputs["logits"] = unshard(outputs["logits"], group=self.group, reduction="sum")[:, :n]
        count = None if num_items_in_batch is None else num_items_in_batch * self._cp
        return compute(outputs, self._inputs.get("labels"), num_items_in_batch=count)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of this rank's tokens of the whole batch `inputs`. The mean over the
        ranks of a group is that of its rows.
        """
        self._inputs = inputs
        # Trainer multiplies by the number of all ranks
        scaled = num_items_in_batch is not None and self.args.average_tokens_across_devices
        count = None if num_items_in_batch is None else num_items_in_batch / self._cp
        mine = shard_batch(inputs, self.group)
        loss, outputs = super().compute_loss(model, mine, True, count)
        loss = loss / self._cp if scaled else loss
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Return loss, logits and labels of whole rows, the same on all ranks of a group."""
        n, labeled = inputs["input_ids"].shape[1], inputs.get("labels") is not None
        if not labeled:  # then Trainer calls the model itself
            inputs = shard_batch(self._prepare_inputs(inputs), self.group)
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        if loss is not None and self.group is not None:
            dist.all_reduce(loss, group=self.group)
            loss /= self._cp
        if isinstance(logits, tuple):
            raise ConfigError(
                f"RingTrainer gathers logits alone, and the model returned {len(logits)} outputs: "
                "name the others in ignore_keys, or in keys_to_ignore_at_inference of its config"
            )
        if logits is not None and not (labeled and self.compute_loss_func):
            logits = unshard(logits, group=self.group)[:, :n]
        return loss, logits, labels
