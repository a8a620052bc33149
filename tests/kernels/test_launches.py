"""What a hop costs beyond the attention kernel and the messages: launches, allocations, and waits
of the host.

The ring runs on the CPU as it would on CUDA: through the TransformerEngine adapter, or as fake CUDA
tensors through those of PyTorch's operators, with the fused merge and sums counted as the one
kernel that each is.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.comm import codecs
from cp_ring.comm.streams import KeyStream
from cp_ring.kernels import REGISTRY, calls, choose, signatures, te_library
from cp_ring.kernels.base import OPEN, no_random_state
from cp_ring.observe.counters import record
from cp_ring.ops import totals
from tests.kernels.emulated_te import installed
from tests.loopback import LoopbackTransport


class Launches(TorchDispatchMode):
    """Counts operators that would launch a CUDA kernel, and fresh memory; `marks` are the counts
    when each hop began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.marks: list[Counter[str]] = []
        self._quiet = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        if not self._quiet and func.namespace == "aten" and not view:
            self.counts["memory" if "empty" in name else name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def counted_as(self, name: str, work):
        """`work` as one launch."""

        @wraps(work)
        def run(*args, **kwargs):
            self.counts[name] += 1
            with self.quiet():
                return work(*args, **kwargs)

        return run

    def hops(self) -> list[Counter[str]]:
        """What each hop added; then what came after the last hop. Forgets the marks."""
        marks, self.marks = self.marks, []
        return [
            after - before for before, after in zip(marks, [*marks[1:], self.counts], strict=True)
        ]


@pytest.fixture
def launches(monkeypatch) -> Iterator[Launches]:
    mode = Launches()
    monkeypatch.setattr(totals, "merge", mode.counted_as("merge", totals.merge))
    monkeypatch.setattr(totals, "add", mode.counted_as("add", totals.add))
    monkeypatch.setattr(calls, "_copied", mode.counted_as("upload", calls._copied))
    monkeypatch.setattr(
        LoopbackTransport, "post", mode.counted_as("messages", LoopbackTransport.post)
    )

    class Marked(KeyStream):
        def __iter__(self):
            for item in super().__iter__():
                mode.marks.append(mode.counts.copy())
                yield item
            mode.marks.append(mode.counts.copy())

    monkeypatch.setattr(codecs, "KeyStream", Marked)
    monkeypatch.setitem(REGISTRY, "emulated", "tests.kernels.emulated_te")
    with installed("2.20.2"):
        library = te_library.installed()
        passes = [mode.counted_as("attention", f) for f in (library.forward, library.backward)]
        library = library._replace(forward=passes[0], backward=passes[1])
        monkeypatch.setattr(te_library, "installed", cache(lambda: library))
        yield mode


def draw(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, 1, h, 16, generator=generator).bfloat16() for h in (4, 2, 2, 4)]


def both(
    plan: Plan, rank: int, launches: Launches
) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """Launches of each hop, forward and backward."""
    q, k, v, dout = draw(plan.n // plan.cp)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with launches:
        out = ring_attention(
            q,
            k,
            v,
            LoopbackTransport(rank, plan.cp),
            plan=plan,
            kernel="emulated",
            qkv_format="sbhd",
        )
        forward = launches.hops()
        torch.autograd.grad(out, inputs, dout)
    *forward, after = forward
    after.pop("_to_copy")  # on the CPU alone, lse in float32
    assert beyond(after) <= 1, after
    *backward, after = launches.hops()
    assert beyond(after) <= 3, after  # the last gradients that arrived, and dq
    return forward, backward


OURS = ("attention", "messages", "memory")


def beyond(hop: Counter[str]) -> int:
    """Launches of a hop beyond the attention kernel and the messages."""
    return sum(count for name, count in hop.items() if name not in OURS)


@pytest.mark.parametrize("rank", range(4))
def test_launches_per_hop(launches, rank):
    """One in forward, none at hop 0; at most 3 in backward; besides, the lse of a call's queries is
    copied where the last call had others."""
    plan = Plan.build(Mask.causal(4 * 1024), Layout.zigzag(4 * 1024, 4), schedule="ring")
    both(plan, rank, launches)  # tensors that are made once
    forward, backward = both(plan, rank, launches)
    assert [beyond(hop) for hop in forward] == [0, 1, 1, 1], forward
    copies = [hop.pop("clone", 0) for hop in backward]
    assert sum(copies) <= 4, backward
    assert len(backward) == 5
    # dq of four calls, and dk and dv that arrived. What leaves is as the kernel made it.
    assert max(beyond(hop) for hop in backward) <= 3, backward
    assert not any(hop.keys() - {"attention", "messages", "memory", "add"} for hop in backward), (
        backward
    )
    assert [hop["attention"] for hop in backward] == [1, 1, 1, 1, 2]
    assert not any("_local_scalar_dense" in hop for hop in forward + backward)


@pytest.mark.parametrize("rank", range(8))
def test_launches_of_hops_with_several_sources(launches, rank):
    """Sources that the same queries see go to the kernel in one call, so 7 remote ones take 3 calls
    at most.
    """
    plan = Plan.build(
        Mask.causal(8 * 256), Layout.zigzag(8 * 256, 8), schedule=(0, 1, 1, 1, 2, 2, 2, 2)
    )
    both(plan, rank, launches)
    forward, backward = both(plan, rank, launches)
    assert len(forward) == 3
    assert sum(hop["attention"] for hop in forward) == (3 if rank in (0, 3, 7) else 4)
    assert [beyond(hop) for hop in forward] == [0, 1, 1], forward
    # Hop 0 is in two halves, of which the second has two tiles.
    assert sum(hop["attention"] for hop in backward) == sum(hop["attention"] for hop in forward) + 2


def test_packed_documents_upload_nothing_in_the_hops(launches):
    """Indices and lengths of packed tiles go to the device before the first hop, once for each
    plan.
    """
    ends = np.cumsum([0, *np.random.default_rng(0).integers(20, 200, 20).tolist()])
    n = int(ends[-1]) // 8 * 8
    plan = Plan.build(Mask.documents(np.minimum(ends, n)), Layout.zigzag(n, 4))
    for repeat in range(2):
        launches.counts.clear()
        forward, backward = both(plan, 1, launches)
        assert not any(hop["upload"] or "_local_scalar_dense" in hop for hop in forward + backward)
        assert bool(launches.counts["upload"]) == (repeat == 0)


def test_nothing_is_worked_out_twice(launches, monkeypatch):
    """A second call of a plan reads no signature, makes no tensor of lengths, and uploads nothing."""
    signatures_read = []
    counted = SimpleNamespace(
        signature=lambda function: signatures_read.append(function) or inspect.signature(function)
    )
    monkeypatch.setattr(signatures, "inspect", counted)
    signatures.parameters_of.cache_clear()
    signatures._names.cache_clear()
    for plan in (
        Plan.build(Mask.causal(4 * 1024), Layout.zigzag(4 * 1024, 4)),
        Plan.build(Mask.causal(4 * 90), Layout.zigzag(4 * 90, 4)),  # uneven: packings of one tile
        Plan.build(Mask.documents([0, 30, 77, 101, 300, 512]), Layout.zigzag(512, 4)),
    ):
        both(plan, 1, launches)
        signatures_read.clear()
        launches.counts.clear()
        both(plan, 1, launches)
        assert launches.counts["attention"]
        assert not signatures_read
        assert not launches.counts.keys() & {"arange", "upload", "searchsorted", "cumsum"}


def test_strided_queries_are_copied_once(launches):
    """As models without rotary embeddings give them: a part of one tensor of queries, keys and
    values.
    """
    plan = Plan.build(Mask.causal(4 * 1024), Layout.zigzag(4 * 1024, 4))
    q, k, v, _ = draw(1024)
    q = torch.cat([q, q], -1)[..., :16]
    with launches, torch.no_grad():
        ring_attention(
            q, k, v, LoopbackTransport(1, 4), plan=plan, kernel="emulated", qkv_format="sbhd"
        )
        launches.hops()
        launches.counts.clear()
        ring_attention(
            q, k, v, LoopbackTransport(1, 4), plan=plan, kernel="emulated", qkv_format="sbhd"
        )
        hops = launches.hops()[:-1]
    assert not any(hop["clone"] for hop in hops)
    assert launches.counts["clone"] == 1


def test_no_buffer_is_made_per_hop(launches):
    """After the first update everything is there; slots do not grow with the ranks."""
    cp = 16
    plan = Plan.build(Mask.causal(cp * 512), Layout.zigzag(cp * 512, cp), schedule="ring")
    with record() as counters:
        forward, backward = both(plan, cp // 2, launches)
    assert counters.slots_peak == 2
    assert counters.slots_alive == 0
    assert len(forward) == cp
    for hop in forward[4:] + backward[4:-1]:
        # The copy of the lse of half the queries is the one thing that is made: where the queries
        # change.
        assert hop["memory"] == 0, hop
    assert sum(hop["clone"] for hop in backward) <= 4, backward


def test_the_adapter_of_torchs_operator_launches_nothing_else():
    no_random_state.cache_clear()
    with FakeTensorMode():
        q, dout = (
            torch.empty(256, 1, 8, 64, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
            for _ in range(2)
        )
        k, v = (
            torch.empty(128, 1, 2, 64, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
            for _ in range(2)
        )
        kernel = choose("flash_aten", device=q.device, dtype=q.dtype, d=64, e=64)
        options = {"lo": -OPEN, "hi": OPEN, "scale": 0.1}
        out, lse = kernel.forward(q, k, v, **options)
        kernel.backward(dout, q, k, v, out, lse, **options)
        with Launches() as launches:
            kernel.forward(q, k, v, **options)
            kernel.backward(dout, q, k, v, out, lse, **options)
        del launches.counts["memory"]
        assert all("attention" in operator for operator in launches.counts), launches.counts
        assert sum(launches.counts.values()) == 2
    no_random_state.cache_clear()
