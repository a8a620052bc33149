"""A whole context-parallel group in one process, with one thread for each rank: for trials, for
accuracy tables, and for one GPU.

A message is a copy that one thread hands to another. So any number of ranks runs on any device. The
results are right, but it is not fast.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from cp_ring.comm.agreement import Backward, differences, of_backward
from cp_ring.comm.same_batch import contents, difference
from cp_ring.comm.transport import MessageBatch, Pending, count, messages
from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.ranges import size_within
from cp_ring.plan.rank_plan import Fact

TIMEOUT = 60.0
"""The seconds that a rank waits for a message before it raises an error."""


class LocalRing:
    """`size` ranks of this process; `run(case, ...)` calls `case(group, ...)` on each and returns
    the results by rank.

        LocalRing(2).run(lambda group: ring_attention(*shard((q, k, v), None, group), group))

    `ring_attention` takes `group` in place of a process group. Raises the error of a rank that
    failed. A rank has one thread for all runs: libraries for GPUs keep what they have compiled by
    thread.
    """

    def __init__(self, size: int):
        self.size = size_within(size, "size", 1 << 10, f"a ring of {size} ranks: it must have")
        self._changed = threading.Condition()
        self._mail: dict[tuple[int, int, int], Tensor] = {}
        self._failed = False
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]

    def run(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        self._failed, grad = False, torch.is_grad_enabled()
        self._calls: dict[int, tuple[int, Sequence[Fact]]] = {}
        self.batches: defaultdict[int, dict[int, Any]] = defaultdict(dict)

        def one(rank: int) -> Any:
            # One shared engine thread for the backward of all ranks would wait for itself.
            with torch.set_grad_enabled(grad), torch.autograd.set_multithreading_enabled(False):
                try:
                    return case(LocalGroup(self, rank), *args, **kwargs)
                except BaseException:
                    with self._changed:
                        self._failed = True
                        self._changed.notify_all()
                    raise

        ranks = [thread.submit(one, rank) for rank, thread in enumerate(self._threads)]
        failures = [error for error in (rank.exception() for rank in ranks) if error]
        self._mail.clear()  # of ranks that failed
        for error in sorted(failures, key=lambda error: isinstance(error, _Abandoned)):
            raise error
        return [rank.result() for rank in ranks]

    def agree(self, rank: int, number: int, facts: Sequence[Fact]) -> None:
        """Compare a rank's call of this number with the first one of that number. Raises
        `PlanError` if they differ.
        """
        first, its_facts = self._calls.setdefault(number, (rank, facts))
        if line := differences(first, its_facts, rank, facts):
            raise PlanError(line)

    def put(self, key: tuple[int, int, int], message: Tensor) -> None:
        with self._changed:
            self._mail[key] = message
            self._changed.notify_all()

    def take(self, key: tuple[int, int, int]) -> Tensor:
        with self._changed:
            if not self._changed.wait_for(lambda: self._failed or key in self._mail, TIMEOUT):
                raise _Abandoned(
                    f"rank {key[1]} of a local ring waited {TIMEOUT:g} s for message {key[2]} of "
                    f"rank {key[0]}"
                )
            if key not in self._mail:
                raise _Abandoned(f"rank {key[1]} of a local ring gave up: another rank failed")
            return self._mail.pop(key)


class _Abandoned(ConfigError):
    """A rank's message did not arrive, perhaps because another rank failed."""


class LocalGroup:
    """One rank of a `LocalRing`, as a transport. Between two ranks, messages arrive in the order in
    which they were posted.
    """

    def __init__(self, ring: LocalRing, rank: int):
        self._ring = ring
        self.rank, self.size = rank, ring.size
        self._sent: dict[int, int] = defaultdict(int)
        self._awaited: dict[int, int] = defaultdict(int)
        self._calls = self._batches = 0

    def check_batch(self, tensors: Mapping[str, Tensor], every: int) -> None:
        """Raise `PlanError` if this batch differs from that of a rank that has come this far. Each
        batch is compared, whatever `every` is; see `BatchComparison.check`.
        """
        batches = self._ring.batches[self._batches]
        batches[self.rank] = contents(tensors)
        self._batches += 1
        if line := difference({rank: batches[rank] for rank in sorted(batches)}):
            raise PlanError(line)

    def agree(self, key: Hashable, facts: Callable[[], Sequence[Fact]], every: int = 1) -> Backward:
        """Compare every call; see `Agreement.check`."""
        self._calls += 1
        call = self._calls
        self._ring.agree(self.rank, call, facts())

        def begin_backward(place: object) -> None:
            self.agree((), lambda: [of_backward(call, call, place)])

        return begin_backward

    def post(self, batch: MessageBatch) -> Pending:
        for peer, buffer in messages(batch.sends):
            self._ring.put((self.rank, peer, self._sent[peer]), buffer.clone())
            self._sent[peer] += 1
        expected = []
        for peer, buffer in messages(batch.receives):
            expected.append(((peer, self.rank, self._awaited[peer]), buffer))
            self._awaited[peer] += 1
        count(batch)
        return _Expected(self._ring, expected)


class _Expected:
    def __init__(self, ring: LocalRing, buffers: list[tuple[tuple[int, int, int], Tensor]]):
        self._ring, self._buffers = ring, buffers

    def wait(self) -> None:
        for key, buffer in self._buffers:
            buffer.copy_(self._ring.take(key))
