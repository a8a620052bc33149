"""Faults that the certificate must reject, planted one at a time, each with the job in which it is
one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tests.parity import faults as parity


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Puts the fault called `name` (none for "") into cp_ring for as long as the context lasts; its
    patches must be in force.
    """
    with contextlib.ExitStack() as stack:
        for owner, attribute, faulty in FAULTS[name]() if name else ():
            stack.enter_context(
                patch.object(owner, attribute, _instead(getattr(owner, attribute), faulty))
            )
        yield


def _instead(right: Any, faulty: Any) -> Any:
    return lambda *args, **kwargs: faulty(right, *args, **kwargs)


def _parity(name: str) -> Any:
    return lambda: [parity.FAULTS[name]()]


def _at(name: str, faulty: Any) -> Any:
    return lambda: [parity.at(name, faulty)()]


def _plain_causal(make_plan: Any, mask: str, n: int, cp: int, window: Any, spec: Any) -> Any:
    return make_plan(mask, n, cp, spec=spec)


def _chunks_swapped(split: Any, batch: Any, rank: int, cp: int) -> Any:
    return {
        name: torch.cat(part.chunk(2, 1)[::-1], 1) for name, part in split(batch, rank, cp).items()
    }


def _ranks_reversed(split: Any, batch: Any, rank: int, cp: int) -> Any:
    return split(batch, cp - 1 - rank, cp)


def _rotary() -> list[Any]:
    name = "get_pos_emb_on_this_cp_rank"
    loaded = [
        module
        for key, module in list(sys.modules.items())
        if key.startswith("megatron.core.models") and module
    ]

    def contiguous(right: Any, pos_emb: Any, seq_dim: int, cp_group: Any) -> Any:
        return pos_emb.chunk(cp_group.size(), seq_dim)[cp_group.rank()]

    return [(module, name, contiguous) for module in loaded if hasattr(module, name)]


def _stale(stream: Any, self: Any) -> Any:
    """Every hop reads what the slots held at the first: the rank's own keys, as far as they go."""
    first = None
    for hop, *keys in stream(self):
        first = first or keys
        fits = len(keys[0]) <= len(first[0])
        yield hop, *([x[: len(keys[0])] for x in first] if fits else keys)


def _hop_lost(start: Any, self: Any, hop: Any) -> None:
    start(self, hop)
    add = type(self).add
    self.add = lambda dk, dv: add(self, 0 * dk, 0 * dv) if hop.index == 1 else add(self, dk, dv)


def _scaled(attention_of: Any, plan: Any, group: Any, options: Any, inputs: Any) -> Any:
    return attention_of(
        plan, group, replace(options, softmax_scale=options.softmax_scale * 1.05), inputs
    )


def _totals(operation: str, rounded: Any) -> Any:
    """After each update, what `rounded` picks of its tensors is rounded to bf16."""

    def faulty(work: Any, segments: Any, *tensors: Any) -> None:
        work(segments, *tensors)
        for total in rounded(*tensors):
            if total is not None:
                total.copy_(total.bfloat16())

    return _at(f"cp_ring.ops.totals.{operation}", faulty)


def _loss_divided(loss: Any, mask: Any, losses: Any, **more: Any) -> Any:
    from megatron.core import parallel_state

    total, count, report = loss(mask, losses, **more)
    return total / parallel_state.get_context_parallel_world_size(), count, report


def _reported_loss_divided(loss: Any, mask: Any, losses: Any, **more: Any) -> Any:
    total, count, report = loss(mask, losses, **more)
    return total, count, {name: value * torch.tensor([0.5, 1.0]) for name, value in report.items()}


def _padding_attended(in_thd: Any, packed: Any, *args: Any) -> Any:
    return in_thd(
        dataclasses.replace(
            packed,
            cu_seqlens_q=packed.cu_seqlens_q_padded,
            cu_seqlens_kv=packed.cu_seqlens_kv_padded,
        ),
        *args,
    )


def _wrong_beyond_256(make_plan: Any, mask: str, n: int, cp: int, window: Any, spec: Any) -> Any:
    left, right = window
    return make_plan(mask, n, cp, (left if n <= 256 else 200, right), spec)


def _second_row_like_the_first(inputs: Any, q: Any, k: Any, v: Any, *more: Any) -> Any:
    return inputs(
        q, k[:, :1].expand(k.shape).contiguous(), v[:, :1].expand(v.shape).contiguous(), *more
    )


def _loss_mask_not_split(split: Any, batch: Any, rank: int, cp: int) -> Any:
    """Every rank gets the first tokens of the loss mask."""
    parts = split(batch, rank, cp)
    return parts | {
        name: batch[name][:, : parts[name].shape[1]] for name in ("loss_mask",) if name in parts
    }


def _key_gradients_in_bf16(finish: Any, self: Any) -> Any:
    return [total.copy_(total.bfloat16()) for total in finish(self)]


def _aux_loss_twice(
    attach: Any,
    self: Any,
    activation: Any,
    coefficient: float,
    loss: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The load-balancing loss weighs twice as much with context parallelism as without."""
    twice = 2 if self.config.context_parallel_size > 1 else 1
    return attach(self, activation, coefficient, loss * twice, *args, **kwargs)


# Names of faults: what they replace, and by what.
FAULTS: dict[str, Any] = {
    "mask dropped to plain causal": _at("cp_ring.megatron.layers.planned.make_plan", _plain_causal),
    "window off by one": _parity("window widened"),
    "window on every layer": _parity("window on every layer"),
    "documents merged": _parity("documents merged"),
    "boundary shifted by one": _parity("boundary shifted by one"),
    "chunk order swapped": _at("cp_ring.megatron.gpt.on_this_cp_rank", _chunks_swapped),
    "rank order reversed": _at("cp_ring.megatron.gpt.on_this_cp_rank", _ranks_reversed),
    "rotary positions contiguous": _rotary,
    "stale slot": _at("cp_ring.comm.streams.KeyStream.__iter__", _stale),
    "gradients of one hop lost": _at("cp_ring.comm.streams.GradStream.start", _hop_lost),
    "sink ignored": _parity("sink dropped"),
    "sink gradient dropped": _parity("sink gradient dropped"),
    "softmax scale": _at("cp_ring.megatron.ring_core_attention.attention_of", _scaled),
    "softmax denominators accumulated in bf16": _totals(
        "merge", lambda outs, lses, running, lse, out: [lse]
    ),
    "outputs accumulated in bf16": _totals(
        "merge", lambda outs, lses, running, lse, out: [running, out]
    ),
    "gradients accumulated in bf16": _totals("add", lambda parts, running, total: [running, total]),
    "loss divided by cp twice": _at("cp_ring.megatron.gpt.loss_function", _loss_divided),
    "reported loss halved": _at("cp_ring.megatron.gpt.loss_function", _reported_loss_divided),
    "padding attended": _at("cp_ring.megatron.data.documents.Documents.in_thd", _padding_attended),
    "window beyond 256 tokens": _at("cp_ring.megatron.layers.planned.make_plan", _wrong_beyond_256),
    "second batch row like the first": _at(
        "cp_ring.megatron.ring_core_attention.Inputs", _second_row_like_the_first
    ),
    "loss mask not split": _at("cp_ring.megatron.gpt.on_this_cp_rank", _loss_mask_not_split),
    "gradients of keys summed in bf16": _at(
        "cp_ring.comm.streams.GradStream.finish", _key_gradients_in_bf16
    ),
    "weight gradient twice": _parity("weight gradient twice"),
    "rotated part not returned": _parity("rotated part not returned"),
    "latent not summed over tp": _parity("latent not summed over tp"),
    "siblings seen": _parity("siblings seen"),
    "spans cut at borders": _parity("spans cut at borders"),
    "global tokens hidden": _parity("global tokens hidden"),
    "positions not continued": _parity("positions not continued"),
    "roll across documents": _parity("roll across documents"),
    "aux loss weighed twice": _at(
        "megatron.core.transformer.moe.router.TopKRouter.attach_and_log_load_balancing_loss",
        _aux_loss_twice,
    ),
}
