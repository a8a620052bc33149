"""What a CUDA graph of ring attention needs: the operations of a call are the same each time, and
none goes by way of the host.

There is no graph on the CPU. Here the operations of a call are recorded and repeated on new values
in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_ring import Layout, Mask, Plan, PlanError, ring_attention
from cp_ring.kernels import calls
from cp_ring.observe import watchdog
from cp_ring.observe.watchdog import Watch
from cp_ring.testing.local_ring import LocalRing
from tests import recorded
from tests.loopback import LoopbackTransport

N, HEADS = 32, (4, 2)
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (9, 0)},
    "balanced": {"causal": True, "window_size": (20, 0), "layout": "balanced"},
    "gather": {"causal": True, "schedule": "gather"},
    "ring route": {"causal": True, "route": "ring"},
    "heads": {"causal": True, "heads": 2},
    "sink": {"causal": True, "sink": True},
    "fp8": {"causal": True, "wire": "fp8"},
    "bfloat16": {"causal": True, "dtype": torch.bfloat16},
    "three slots": {"causal": True, "num_slots": 3, "schedule": "ring"},
    "batch": {"causal": True, "batch": 2, "softmax_scale": 0.3},
}


def draw(
    seed: int, cp: int, batch: int = 1, dtype: torch.dtype = torch.float32, **_: Any
) -> list[list[Tensor]]:
    """q, k, v, dout and a sink of each rank."""
    generator, (h, g) = torch.Generator().manual_seed(seed), HEADS
    shapes = [(batch, N // cp, heads, 16) for heads in (h, g, g, h)] + [(h,)]
    return [
        [torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(cp)
    ]


def attention(
    group: Any, ranks: list[list[Tensor]], sink: bool = False, **arguments: Any
) -> list[Tensor]:
    """Out and gradients of one call of a rank."""
    *inputs, dout, offset = ranks[group.rank]
    leaves = [x.detach().requires_grad_() for x in (*inputs, offset)]
    out = ring_attention(*leaves[:3], group, sink=leaves[3] if sink else None, **arguments)
    return [out.detach(), *torch.autograd.grad(out, leaves[: 3 + sink], dout)]


def on_ring(
    ranks: list[list[Tensor]], recording: Callable[[], Any] = nullcontext, dtype: Any = None, batch: int = 1, **arguments: Any
) -> list[list[Tensor]]:  # fmt: skip
    """The results of all ranks of a local ring; each runs within `recording()`."""

    def case(group: Any) -> list[Tensor]:
        with recording():
            return attention(group, ranks, **arguments)

    return ring_of(len(ranks)).run(case)


ring_of = cache(LocalRing)  # its ranks know the calls that they have made


def put(values: list[list[Tensor]], into: list[list[Tensor]]) -> None:
    for target, value in zip(flat(into), flat(values), strict=True):
        target.copy_(value)


def flat(ranks: list[list[Tensor]]) -> list[Tensor]:
    return [x for rank in ranks for x in rank]


@pytest.mark.parametrize("name", CASES)
def test_repeating_the_operations_is_a_call_with_other_values(name):
    """The operations of 4 ranks, messages among them, repeated on new values: the bits of a call
    with these values.
    """
    arguments = CASES[name]
    ranks, others = draw(1, 4, **arguments), draw(2, 4, **arguments)
    on_ring(ranks, **arguments)  # the warm-up
    operations: list[recorded.Operation] = []
    names: list[str] = []
    # One list of all ranks, whose operations are in it as they followed one another.
    results = on_ring(ranks, partial(recorded.Recording, operations, names), **arguments)
    assert not recorded.of_the_host(operations, names)
    wanted = on_ring(others, **arguments)
    assert not any(torch.equal(x, y) for x, y in zip(flat(results), flat(wanted), strict=True))
    put(others, ranks)
    recorded.repeat(operations)
    assert all(torch.equal(x, y) for x, y in zip(flat(results), flat(wanted), strict=True))


@pytest.mark.parametrize("name", ["causal", "window", "heads", "sink", "fp8"])
def test_two_calls_are_the_same_operations(name):
    """On inputs, on what the call has made itself, and on tables of the warm-up; never on something
    new of the host.
    """
    arguments, transport = dict(CASES[name]), LoopbackTransport(2, 4)
    ranks = draw(1, 4, **arguments)
    call = partial(
        attention,
        transport,
        ranks,
        **{key: x for key, x in arguments.items() if key not in ("dtype", "batch")},
    )
    call()
    (first, _), (second, _) = recorded.record(call), recorded.record(call)
    (one, before), (two, later) = (recorded.signature(each, ranks[2]) for each in (first, second))
    assert not list(recorded.pairs(one, two))
    assert later == before


def planted(change: Callable[[Tensor], Any]) -> Callable[[], Any]:
    """A call of one rank whose kernel calls do something more."""
    ranks = draw(1, 1)

    def call() -> list[Tensor]:
        results = attention(LoopbackTransport(0, 1), ranks, causal=True)
        change(results[0])
        return results

    return call


@pytest.mark.parametrize(
    "change",
    [lambda x: x.sum().item(), lambda x: x.sum().tolist(), lambda x: x.nonzero(), lambda x: bool((x > 0).any()),
     lambda x: x * torch.tensor(2.0)],
)  # fmt: skip
def test_what_goes_by_way_of_the_host_is_found(change):
    assert recorded.of_the_host(*recorded.record(planted(change)))


def test_tables_of_the_host_are_found():
    """An index made anew by each call is memory that neither the caller nor an operation has
    written.
    """
    kept = []

    def change(x: Tensor) -> None:
        kept.append(torch.from_numpy(calls.np.arange(4)))
        x.index_select(1, kept[-1])

    call = planted(change)
    (first, _), (second, _) = recorded.record(call), recorded.record(call)
    inputs = draw(1, 1)[0]
    assert recorded.signature(first, inputs)[1] != recorded.signature(second, inputs)[1]


def test_a_capture_does_not_begin_with_a_new_call(monkeypatch):
    plan = Plan.build(Mask.causal(N), Layout.zigzag(N, 1))
    ranks = draw(1, 1)
    monkeypatch.setattr(calls, "capturing", lambda device: True)
    with pytest.raises(
        PlanError, match="this call of ring attention is new, and a CUDA graph cannot begin with it"
    ):
        attention(LoopbackTransport(0, 1), ranks, plan=plan)
    monkeypatch.undo()
    attention(LoopbackTransport(0, 1), ranks, plan=plan)
    monkeypatch.setattr(calls, "capturing", lambda device: True)
    attention(LoopbackTransport(0, 1), ranks, plan=plan)


class Counting(LoopbackTransport):
    """Counts batches that were posted, and those that were waited for."""

    posted = waited = 0

    def post(self, batch: Any) -> Any:
        pending, self.posted = super().post(batch), self.posted + bool(batch)
        if not batch:
            return pending
        return type("Pending", (), {"wait": self.wait})()

    def wait(self) -> None:
        self.waited += 1


@pytest.mark.parametrize("name", ["causal", "window", "ring route", "heads", "three slots", "fp8"])
def test_every_message_is_waited_for(name):
    """The stream of the messages joins that of the capture: after forward, and after backward,
    nothing is on its way.
    """
    arguments, ranks = CASES[name], draw(1, 4)
    on_ring(ranks, **arguments)
    for rank in range(4):
        transport = Counting(rank, 4)
        leaves = [x.detach().requires_grad_() for x in ranks[rank][:3]]
        out = ring_attention(*leaves, transport, **arguments)
        forward = transport.posted
        assert forward and transport.waited == forward
        torch.autograd.grad(out, leaves, ranks[rank][3])
        assert transport.posted > forward and transport.waited == transport.posted


def test_the_watchdog_does_not_ask_a_device_that_captures(monkeypatch):
    class OnDevice:
        is_cuda, device = True, torch.device("cuda")

    batch = type(
        "Batch", (), {"receives": [(None, [OnDevice()])], "sends": [], "kind": "keys", "hop": 1}
    )()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for captures in (False, True):
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures
        )
        monkeypatch.setattr(watchdog, "_describe", lambda *_: {})
        watch = Watch()
        watch.begin(batch, [])
        assert (watch.sampled is not None) is not captures
        assert watch.longest()[0] is batch
