"""DeepSeek's sparse attention with latents and the indexer's keys on the wire of ring attention, in
place of Megatron's all-gather of both.

Shapes: s tokens of this rank, b microbatch, h heads of this tensor-parallel rank.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any, override

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
    DSAttention,
)
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed import ReduceOp, all_reduce, get_process_group_ranks

from cp_ring.attention import rank_plan_of
from cp_ring.comm.sparse_loop import IndexerLoss, SparseAttention, SparseCall, select
from cp_ring.comm.transport import rank_in_job, transport_for
from cp_ring.errors import ConfigError
from cp_ring.megatron import compat
from cp_ring.megatron.data.documents import DocumentParams, documents_of, without_whole_rows
from cp_ring.megatron.data.prefetch import wait_for
from cp_ring.megatron.flags.comm_types import spec_of_sparse_layer
from cp_ring.megatron.layers.layer_offload import in_backward
from cp_ring.megatron.plans import make_plan
from cp_ring.megatron.settings import current, packed_in_whole_rows
from cp_ring.observe import debug, timing, watchdog


class RingSparseAttention(DSAttention):
    """Megatron's sparse attention, where tokens are split over the ranks by `cp_comm_type` p2p: its
    own weights, selection and loss, from keys that arrive hop by hop. With all_gather, and on one
    rank, it is Megatron's own.

    Raises `ConfigError` for what the all-gather alone supports.
    """

    @override
    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.cp_group = compat.group_of(self.pg_collection, "cp")
        self.ringed = self.cp_comm_type != "allgather" and self.cp_group.size() > 1
        if not self.ringed:
            return
        settings = self.settings = current()
        ranks = get_process_group_ranks(self.cp_group)
        self.spec = spec_of_sparse_layer(config, self.cp_comm_type, settings, ranks)
        watchdog.start(settings.hop_timeout)
        if settings.debug:
            debug.switch_on()

    @override
    @_disable_dynamo
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor | None, attention_mask: Tensor | None,
        x: Tensor, qr: Tensor, position_ids: Tensor | None = None, attn_mask_type: Any = None,
        attention_bias: Any = None, packed_seq_params: Any = None,
        up_v_weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As Megatron's, of query [s, b, h, c + r], key [s, b, 1, c + r] and `up_v_weight` [h, v,
        c]; of packed documents without b.
        """
        if not self.ringed:
            out: Tensor = super().forward(
                query, key, value, attention_mask, x, qr, position_ids, attn_mask_type,
                attention_bias, packed_seq_params, up_v_weight,
            )  # fmt: skip
            return out
        if (
            value is not None
            or up_v_weight is None
            or getattr(attn_mask_type, "name", "") != "causal"
        ):
            raise ConfigError(
                "sparse attention whose latents travel from rank to rank needs the causal mask, "
                "and latents of multi-latent attention: give cp_comm_type all_gather"
            )
        if query.dim() == 3:
            query, key = query.unsqueeze(1), key.unsqueeze(1)
        packed = without_whole_rows(packed_seq_params, len(query) * self.cp_group.size())
        step = compat.training_step()
        timing.at_step(step)
        call, positions = self._call(query, packed, watchdog.enter(self.layer_number, step))
        selection, indexer = self._select(call, positions, x, qr, packed_seq_params, attention_mask)
        attended, loss = SparseAttention.apply(call, selection, query, key.squeeze(2), *indexer)
        if call.loss is not None:
            attended = DSAIndexerLossAutoScaler.apply(attended, loss)
        weight = up_v_weight.to(query.dtype)
        out = torch.einsum("sbhc,hvc->sbhv", attended, weight).flatten(2)
        return out if x.dim() == 3 else out.squeeze(1)

    def _call(self, query: Tensor, packed: Any, place: Any) -> tuple[SparseCall, Tensor]:
        """What the passes of a call share, and the positions of this rank's tokens."""
        group, (s, b, heads, _) = self.cp_group, query.shape
        rank, cp, counted = group.rank(), group.size(), None
        if packed is None:
            whole = make_plan("causal", s * cp, cp, spec=self.spec)
            plan: Any = whole
            positions = torch.from_numpy(whole.layout.positions(rank))
        else:
            if isinstance(packed, DocumentParams) or getattr(packed, "local_cp_size", None):
                raise ConfigError(
                    "sparse attention supports packed documents (thd) on all context-parallel "
                    "ranks alone"
                )
            documents = documents_of(_with_padding(packed), s * b, cp, packed_in_whole_rows())
            with timing.waiting_for_plan():
                plan = wait_for(documents.prepare(rank, (-1, -1), True, self.spec))
            positions = documents.places(rank)[:, 0]
            counted = getattr(packed, "real_token_mask_q", None)
        transport = transport_for(group, query.device)
        config, loss = self.config, None
        teaches = self.training and torch.is_grad_enabled() and not self.skip_topk
        if teaches and config.dsa_indexer_loss_coeff:
            tp = self.pg_collection.tp
            loss = IndexerLoss(
                config.dsa_indexer_loss_coeff, not config.dsa_indexer_use_sparse_loss,
                heads * tp.size(), partial(_over_heads, tp),
                None if counted is None else counted.bool().expand(b, s), self._record,
            )  # fmt: skip
        wire = {"input": query.dtype, "bfloat16": torch.bfloat16}
        return SparseCall(
            rank_plan_of(plan, transport), transport, place, rank_in_job(transport),
            self.index_topk, self.softmax_scale, config.kv_lora_rank,
            config.dsa_indexer_scoring_relu, self.settings.num_slots,
            wire.get(self.settings.wire_dtype, torch.float32), in_backward(), loss,
        ), positions.to(query.device)  # fmt: skip

    def _select(
        self, call: SparseCall, positions: Tensor, x: Tensor, qr: Tensor, packed: Any, mask: Any
    ) -> tuple[Any, tuple[Tensor | None, ...]]:
        """The selection of this layer, or of the one whose selection it shares, and queries,
        weights and keys of the indexer, if there is a loss.
        """
        shared = self._get_index_share_topk_holder(packed, mask) if self.index_share else {}
        if self.skip_topk:
            return shared[self.source_layer], (None, None, None)
        with torch.set_grad_enabled(call.loss is not None):
            q, k, weights = self.indexer.forward_before_topk(x.detach(), qr.detach(), packed)
        selection = shared[self.layer_number] = select(call, q, weights, k, positions)
        return selection, (None, None, None) if call.loss is None else (q, weights, k)

    def _record(self, loss: Tensor) -> None:
        DSAIndexerLossLoggingHelper.save_loss_to_tracker(
            loss, self.layer_number, self.config.num_layers, reduce_group=self.cp_group
        )


def _over_heads(group: Any, x: Tensor) -> None:
    if group.size() > 1:
        all_reduce(x, ReduceOp.SUM if x.is_floating_point() else ReduceOp.MAX, group=group)


def _with_padding(packed: Any) -> Any:
    """Documents as Megatron's sparse attention takes them: their padding is theirs."""
    padded = copy.copy(packed)
    for side in ("q", "kv"):
        if (offsets := getattr(packed, f"cu_seqlens_{side}_padded", None)) is not None:
            setattr(padded, f"cu_seqlens_{side}", offsets)
    return padded


def sparse_submodules(submodules: Any) -> Any:
    """A copy of the submodules of an attention layer with `RingSparseAttention` in place of
    Megatron's class.
    """
    core = submodules.core_attention
    return dataclasses.replace(
        submodules, core_attention=dataclasses.replace(core, module=RingSparseAttention)
    )
