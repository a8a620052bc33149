"""Finds what an attention layer needs for a microbatch: the ranks that share it, its mask, and the
plan that splits its tokens over these ranks.

Shapes: s tokens of this rank, b microbatch, h query heads of this tensor-parallel rank, d head
size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from cp_ring.comm.groups import choose_for
from cp_ring.comm.nodes import node_size, ranks_per_node
from cp_ring.cuts import check_cut
from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.adapter.ahead import LAYERS, LayerPlan
from cp_ring.megatron.adapter.asked import layer_problem, window_of_layer, window_problem
from cp_ring.megatron.adapter.comm_types import spec_of_layer
from cp_ring.megatron.adapter.config import RingConfig, Split, in_force
from cp_ring.megatron.adapter.documents import (
    ALONE,
    documents_of,
    group_of_microbatch,
    without_whole_rows,
)
from cp_ring.megatron.adapter.heads_choice import with_choice
from cp_ring.observe import timing
from cp_ring.ops.capture import capturing
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec, plan
from cp_ring.runtime import RUNTIME

if TYPE_CHECKING:
    from cp_ring.attention import AnyPlan

# packed documents tell their padding
_PADDED = {"padding_causal": "causal", "padding": "no_mask"}


class PlannedAttention(MegatronModule):
    """A core attention layer over the context-parallel group, or over this rank alone if the
    layer's configuration has context parallel size 1.

    Raises `ConfigError` for layers that ring attention does not support.
    """

    # True if positions follow the group of a microbatch; the patch core_attention sets it.
    positions_by_group = False

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None,
        pg_collection: Any,
        ring: RingConfig | None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.ring = ring or in_force()
        self._by_hand = ring is not None
        cp = config.context_parallel_size
        self.cp_group = ALONE if cp == 1 else compat.group_of(pg_collection, "cp")
        if self.cp_group.size() != cp:
            raise ConfigError(
                f"layer {layer_number}: its configuration has context_parallel_size {cp}, but its "
                f"context-parallel group, by default Megatron's, has {self.cp_group.size()} ranks: "
                "change it, or give the model a pg_collection with a group cp of as many ranks"
            )
        if cp > 1 and self.ring.layout != in_force().layout:
            raise ConfigError(
                f"layer {layer_number}: its RingConfig has the layout {self.ring.layout}, but "
                f"rotary embeddings are split by {in_force().layout}: call cp_ring.megatron.enable("
                f"layout={self.ring.layout!r}) before the model is built, or leave layout out"
            )
        self.tp_group = compat.group_of(pg_collection, "tp")
        choose_for(torch.device("cuda"))
        if problem := layer_problem(config, layer_number, attention_type):
            raise ConfigError(problem)
        self.cp_comm_type = cp_comm_type
        self.spec = self._spec_on(self.cp_group)
        self._specs = {self.cp_group: self.spec}  # other keys: groups of single microbatches
        mask = mask_of(attn_mask_type)
        # an encoder, or a model of its own: its batches are not those that carry masks
        group = compat.group_of(pg_collection, "cp")
        self._own_tokens = cp == 1 and (mask == "no_mask" or group is ALONE or group.size() > 1)
        self.window = _window(config, layer_number, mask)
        LAYERS.add(LayerPlan(cp, self.cp_group.rank(), self.window, mask == "causal", self.spec))

    def shared_by(self, query: torch.Tensor, packed_seq_params: Any) -> tuple[Any, Any]:
        """Return the group of ranks that share a microbatch, and `packed_seq_params`, or None if
        each batch row is one document. Queries are [s, b, h, d], or [s, h, d] for packed documents.
        """
        group = group_of_microbatch(packed_seq_params, self.cp_group)
        if not (self._by_hand or group.size() == 1 or in_force().split.equals(self.ring.split)):
            raise ConfigError(
                f"layer {self.layer_number}: cp_ring.megatron.enable was called again after its "
                "model was built, so batches are no longer split by its layout, "
                f"{self.ring.layout} of its windows: call enable once, and train models of other "
                "settings in processes of their own"
            )
        if query.dim() == 3:
            return group, packed_seq_params
        if group is not self.cp_group:
            raise ConfigError(
                "packed_seq_params.cp_group or local_cp_size is for fewer ranks than the model's, "
                "and the batch is not packed: give packed documents (thd), or leave it out"
            )
        if group.size() > 1 and query.shape[0] == self.ring.row:
            raise ConfigError(
                f"this rank has all {query.shape[0]} tokens of a batch row (seq_length of enable), "
                f"but should have 1/{group.size()} of them: give the model "
                "cp_ring.megatron.split_batch(batch)"
            )
        return group, without_whole_rows(packed_seq_params, query.shape[0] * group.size())

    def plan_of(self, query: torch.Tensor, mask: str, packed_seq_params: Any) -> AnyPlan:
        """Return the plan for queries [s, b, h, d] with the mask type `mask` and the documents of
        the batch, if it has any.
        """
        group = group_of_microbatch(packed_seq_params, self.cp_group)
        cp, (tokens, batch) = group.size(), query.shape[:2]
        if packed_seq_params is None:
            if (lost := self.ring.expected) and not self._own_tokens:
                raise ConfigError(
                    f"{lost}: layer {self.layer_number} got a microbatch without "
                    "packed_seq_params, so its documents or masks are lost: hand packed_seq_params "
                    "to the model on every pipeline stage"
                )
            made = make_plan(mask, tokens * cp, cp, self.window, self.spec, self.ring.split)
            check_cut(group, made.layout, f"layer {self.layer_number}")
            return made
        if capturing(query.device):
            raise ConfigError(
                f"layer {self.layer_number}: a CUDA graph would repeat the documents or mask of "
                "this microbatch: leave attention out of graphs"
            )
        documents = documents_of(packed_seq_params, (batch, tokens), cp, self.ring)
        with timing.waiting_for_plan():
            return documents.rank_plan(
                group.rank(), self.window, mask == "causal", self._spec_of(group)
            )

    def _spec_of(self, group: Any) -> PlanSpec:
        """Return the plan specification for `group`: all context-parallel ranks, or the ranks of
        one microbatch.
        """
        if group not in self._specs:
            self._check_subgroup()
            self._specs[group] = self._spec_on(group)
        return self._specs[group]

    def _check_subgroup(self) -> None:
        """Raise `ConfigError` if microbatches of this job cannot have groups of their own."""
        config = self.config
        need = ""
        if not self.positions_by_group:
            need = (
                "for which Megatron's rotary embeddings need a patch: call cp_ring.megatron.enable "
                "before the model is built, or give --cp-ring"
            )
        elif not config.calculate_per_token_loss:
            need = "which needs --calculate-per-token-loss (config.calculate_per_token_loss)"
        elif np.any(config.moe_aux_loss_coeff or 0):
            need = (
                f"which does not support --moe-aux-loss-coeff {config.moe_aux_loss_coeff}: give 0"
            )
        elif config.is_hybrid_model or config.experimental_attention_variant:
            need = "which models with recurrent or sparse layers do not support: leave it out"
        if need:
            raise ConfigError(
                "packed_seq_params.cp_group or local_cp_size is for fewer ranks than the model's, "
                f"{need}"
            )

    def _spec_on(self, group: Any) -> PlanSpec:
        kind = self.cp_comm_type
        tp, cp = self.tp_group.size(), group.size()
        near = node_size(dist.get_process_group_ranks(group), ranks_per_node()) if cp > 1 else 1
        spec = spec_of_layer(kind, self.ring, self.config, tp, cp)
        return with_choice(spec, kind, self.ring, self.config, tp, cp, near)

    def check_batch_mask(self, attention_mask: torch.Tensor, mask: str, plan: AnyPlan) -> None:
        """Raise `ConfigError` unless the mask tensor is the declared causal mask of this rank's
        tokens in `plan`, which for documents is that of one rank.
        """
        if mask != "causal" or not isinstance(plan, Plan):
            declared = f"the mask type {mask}" if isinstance(plan, Plan) else "the documents"
            raise ConfigError(
                f"the batch holds an attention mask beside {declared}, which ring attention "
                "computes itself: give --no-create-attention-mask-in-dataloader"
            )
        from cp_ring.megatron.adapter.batch_mask import accept_causal  # few batches hold a mask

        accept_causal(attention_mask, plan.layout, self.cp_group.rank())


@RUNTIME.cache(maxsize=64)
def make_plan(
    mask: str, n: int, cp: int, window: tuple[int, int], spec: PlanSpec, split: Split
) -> Plan:
    """Return the proven plan of Megatron's mask type `causal` or `no_mask` over `n` tokens on `cp`
    ranks, which all layers share. For documents see `documents`.

    window: the numbers of keys before and after its own position that a query sees; -1 means all.

    Raises `PlanError` if mask, layout, route and schedule do not make a correct plan.
    """
    spec = replace(spec, layout=split.layout_of(n, cp))
    return plan({"causal": Mask.causal, "no_mask": Mask.full}[mask](n, window=window), cp, spec)


def mask_of(mask_type: Any, packed: bool = True) -> str:
    """Return the mask type `causal` or `no_mask`. With `packed` the types with padding are accepted
    too.
    """
    name = str(getattr(mask_type, "name", mask_type))
    name = _PADDED.get(name, name) if packed else name
    if name not in ("causal", "no_mask"):
        raise ConfigError(
            f"--cp-ring supports the attention mask types causal and no_mask, not {name}"
        )
    return name


def _window(config: Any, layer_number: int, mask: str) -> tuple[int, int]:
    """Return how many keys before and after its own position a query of this layer sees; -1 means
    all.

    Raises `ConfigError` if the window contradicts the mask, or the configuration does not say
    whether this layer has it.
    """
    window = config.window_size
    frequency = config.window_attn_skip_freq
    if window is None:
        return -1, -1
    if problem := window_problem(window, causal=mask == "causal"):
        raise ConfigError(problem)
    if isinstance(frequency, list) and layer_number > len(frequency):
        raise ConfigError(
            f"--window-attn-skip-freq has {len(frequency)} entries, but there is a layer "
            f"{layer_number}: give one entry for each layer"
        )
    return window_of_layer(config, layer_number)
