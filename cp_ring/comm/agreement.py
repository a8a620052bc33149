"""Ranks that make different calls stop with one line, instead of filling each other's buffers with
the wrong tokens.

The first time that a rank makes a call with a new plan, dtype or shape, it meets the other ranks of
its group before any message leaves, and they compare their calls: `Agreement.check`. They meet in
the process group's store, not in a collective, so nothing waits for the device, no message can be
mistaken for another, and the wait has an end. A call that is known costs one look-up. No thread
runs and nothing asks the store between two meetings. So a rank that makes a new call where another
one repeats a known call waits for it in vain: its error names the missing rank, and the error of
the other rank, whose messages do not come, names the new call.

The order in which backward runs is compared likewise: the places of this call and of the call whose
backward ran last, counted from the latest call, are new, or known.

Every new call is compared by default. Packed documents bring a new plan with every microbatch, so a
Megatron job compares the first `FIRST` new calls of a group one by one, then one in
`--cp-ring-compare-every`. The digest covers all calls since the last comparison. So a difference
between two comparisons is found late, but it is found, and so are known calls that two ranks make
in different orders. Until then gloo delivers none of these messages, because their tag
(`Agreement.tag`) is a digest of all calls so far. NCCL has no tags.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from cp_ring.errors import PlanError, one_line
from cp_ring.observe import debug
from cp_ring.plan.ranges import digest
from cp_ring.plan.records import Fact
from cp_ring.runtime import RUNTIME, Cell

FIRST = 32
EVERY = 1
_MAX_KNOWN = 1024
_KEY = "cp_ring/"
_GRACE_S = 2.0  # between the errors of ranks that wait for one another

LIMIT: Cell[float | None] = RUNTIME.cell(None)
"""The seconds that a rank waits for others in a meeting, in place of the group's timeout."""

Backward = Callable[[object], None]
"""What backward of a call does first; its argument is the place of the call, for the error."""


class Meetings:
    """The meetings of one rank with the other ranks of its group about one topic. Only these ranks
    share `store`.
    """

    def __init__(self, store: Any, rank: int, size: int, topic: str):
        self._store, self._base = store, f"{_KEY}{topic}/"
        self.rank, self.size, self._number = rank, size, 0
        self._counted = -1  # the meeting to which this rank came last; it may come again

    def meet(self, mine: object, conclude: Callable[[dict[int, Any]], str], what: str) -> str:
        """Return the result of `conclude` for the ranks' contributions by rank. All ranks get the
        same result.

        The last rank that comes calls `conclude`; `mine`, this rank's contribution, reaches it as
        JSON. `what` says in an error what this rank does. Raises `PlanError` if a rank does not
        come before the timeout of the store.
        """
        base, store = f"{self._base}{self._number}", self._store
        store.set(f"{base}/{self.rank}", json.dumps(mine))
        again, self._counted = self._counted == self._number, self._number
        if not again and store.add(base, 1) == self.size:
            keys = [f"{base}/{rank}" for rank in range(self.size)]
            brought = dict(enumerate(map(json.loads, store.multi_get(keys))))
            for key in (base, *keys):
                store.delete_key(key)
            store.set(f"{base}/end", conclude(brought))
        wait_for_ranks(store, [f"{base}/end"], base, self.rank, self.size, what)
        conclusion: bytes = store.get(f"{base}/end")
        # All ranks are here, so none still reads the conclusion of the previous meeting.
        if self.rank == 0 and self._number:
            store.delete_key(f"{self._base}{self._number - 1}/end")
        self._number += 1
        return conclusion.decode()

    def compare(self, mine: object, conclude: Callable[[dict[int, Any]], str]) -> str:
        """Return the result of `conclude` for `mine` and what other ranks bring to the next meeting
        within `_GRACE_S`, by rank. It ends the meeting for those that wait in it.
        """
        base, store = f"{self._base}{self._number}", self._store
        keys = [f"{base}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps(mine))
        with contextlib.suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=_GRACE_S))
        line = conclude(
            {rank: json.loads(store.get(x)) for rank, x in enumerate(keys) if store.check([x])}
        )
        if line:
            store.set(f"{base}/end", line)
        return line


def wait_for_ranks(store: Any, keys: list[str], base: str, rank: int, size: int, what: str) -> None:
    """Wait for keys of the store. Raises `PlanError` after `LIMIT`, or the timeout of the store: it
    names the ranks r without a key `base`/r, and says by `what` what this rank does.
    """
    seconds = LIMIT.value or store.timeout.total_seconds()
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:
        try:
            absent = [str(r) for r in range(size) if not store.check([f"{base}/{r}"])]
        except RuntimeError:  # the store is gone, because the rank that held it has ended
            absent = []
        raise PlanError(
            f"rank {rank} of {size} {what}, and rank {', '.join(absent) or 'another'} of the group "
            f"made none within {seconds:g} s: all ranks must make the same calls "
            f"({one_line(error)})"
        ) from None


def is_due(number: int, every: int) -> bool:
    """Return True if the `number`-th new call or batch is compared: the first `FIRST` are, then one
    in `every`, or none if that is 0.
    """
    return debug.enabled() or (bool(every) and (number <= FIRST or number % every == 0))


class Agreement:
    """The calls that one rank and the other ranks of its group have agreed on. Only these ranks
    share `store`.

    tag: 24 bits that are equal on ranks that have made the same calls in the same order.
    """

    def __init__(self, store: Any, rank: int, size: int):
        self._meetings = Meetings(store, rank, size, "agreement")
        self._known: OrderedDict[Hashable, bytes] = OrderedDict()
        self._latest: Callable[[], Sequence[Fact]] = list
        self._begin()

    def _begin(self) -> None:
        self._known.clear()
        self._history = hashlib.blake2b(digest_size=16)
        self._new = self.tag = 0
        self._calls = self._last = 0  # calls so far, and the one whose backward ran last
        self._before = 0, 0  # these two before the latest event
        self._events = 0  # calls and backward calls so far

    def check(
        self, key: Hashable, facts: Callable[[], Sequence[Fact]], every: int = EVERY
    ) -> Backward:
        """Compare a new call with those of the other ranks; all ranks make their calls in the same
        order.

        Equal facts have equal keys. The first `FIRST` new calls are compared, then one in `every`;
        0 compares none. Under `debug.debugging` each call is compared. Returns what backward of the
        call does first: it compares the order of backward calls.

        Raises `PlanError` if two ranks that compare a call differ, on all ranks: the line names the
        facts and the values. If a rank does not come, it names that rank.
        """
        self._before, self._calls = (self._calls, self._last), self._calls + 1
        self._compare(key, facts, every)
        return partial(self._check_backward, self._calls, min(every, 1))

    def _check_backward(self, call: int, every: int, place: object) -> None:
        # Both places: a wrong order may be made of steps that are known from other orders.
        places = self._calls - call, self._calls - self._last
        self._before, self._last = (self._calls, self._last), call
        self._compare(("backward", places), lambda: [of_backward(call, places, place)], every)

    def _compare(self, key: Hashable, facts: Callable[[], Sequence[Fact]], every: int) -> None:
        self._latest, content = facts, self._known.get(key)
        before = self._history.copy(), self._new, self._events, self.tag
        new, meet = content is None, debug.enabled()
        if content is None:
            self._new += 1
            meet = is_due(self._new, every)
            content = str([fact[:2] for fact in facts()]).encode()
            content = self._known[key] = digest(content).encode()
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        self._history.update(content)
        self._events += 1
        self.tag = int.from_bytes(self._history.digest()[:3])
        if meet:
            try:
                self._meet(facts())
            except BaseException:
                if self._events:  # a rank did not come, and knows nothing of this call
                    if new:
                        self._known.pop(key, None)
                    self._history, self._new, self._events, self.tag = before
                    self._calls, self._last = self._before
                raise

    def _meet(self, facts: Sequence[Fact]) -> None:
        mine = self._events, self._history.hexdigest(), facts
        what = f"made a call that is new to it ({_words(facts)})"
        line = self._meetings.meet(mine, _conclusion, what)
        if line:
            self._begin()  # after which the ranks may agree again
            raise PlanError(line)

    def explain(self, error: RuntimeError, peers: Iterable[int]) -> Exception:
        """Return the error of messages of `peers` that did not come: a `PlanError` if ranks that
        wait too make other calls, on all of them, else one that names the peers.
        """
        facts, rank = self._latest(), self._meetings.rank
        mine = self._events, self._history.hexdigest(), facts

        def conclude(calls: dict[int, Any]) -> str:
            # A rank that has made more calls, or fewer, may wait for a third one.
            return _conclusion({r: call for r, call in calls.items() if call[0] == mine[0]})

        try:
            line = self._meetings.compare(mine, conclude)
        except RuntimeError:  # the store is gone, because the rank that held it has ended
            line = ""
        if line:
            return PlanError(line)
        return RuntimeError(
            f"rank {rank} of {self._meetings.size} waits in vain for rank "
            f"{', '.join(map(str, sorted({*peers})))} ({_words(facts)}): {one_line(error)}"
        )


def _words(facts: Sequence[Fact]) -> str:
    return ", ".join(f"{fact.name} {fact.words}" for fact in facts)


def of_backward(call: int, content: object, place: object) -> Fact:
    """Return the fact that backward of a call runs."""
    return Fact("gradient", str(content), f"that of call {call}" + f" ({place})" * bool(str(place)))


_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Any]] = RUNTIME.keep(
    weakref.WeakKeyDictionary()
)


def shared[T](kind: Callable[[Any, int, int], T], group: dist.ProcessGroup) -> T:
    """Return the object of a kind that all transports of a process group share, as an `Agreement`.
    It is made from a store that only the ranks of the group share, the rank, and their number.
    """
    of_group = _shared.setdefault(group, {})
    if kind not in of_group:
        store = dist.PrefixStore(_numbers.get(group, ""), _store(group))
        of_group[kind] = kind(store, dist.get_rank(group), dist.get_world_size(group))
    return of_group[kind]


def begin_anew() -> None:
    """Make the next calls of this rank new to its groups, as if it had made none. All ranks call
    this at the same place.
    """
    for of_group in _shared.values():
        if agreement := of_group.get(Agreement):
            agreement._known.clear()
            agreement._new = 0


_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = RUNTIME.keep(
    weakref.WeakKeyDictionary()
)


def meet_first(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait until all ranks of a group are here, then run its first collective on `device`, an
    all-reduce. Raises `PlanError` that names a rank that does not come.

    Rank 0 gives the others a random number that becomes part of the keys in the store, which may
    still have those of an earlier group of the same name. It answers what each rank drew.
    """
    store, rank, size = _store(group), dist.get_rank(group), dist.get_world_size(group)
    base, drawn = f"{_KEY}first/{device.type}", secrets.token_hex(8)
    keys, answer = [f"{base}/{each}" for each in range(size)], f"{base}/for/"
    store.set(keys[rank], drawn)
    what = "made the first call of its group"
    if rank == 0:
        wait_for_ranks(store, keys, base, rank, size, what)
        for key in keys:
            store.set(answer + store.get(key).decode(), drawn)
    wait_for_ranks(store, [answer + drawn], base, rank, size, what)
    _numbers.setdefault(group, store.get(answer + drawn).decode())
    store.delete_key(keys[rank])
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _store(group: dist.ProcessGroup) -> Any:
    # a copy, because a wait on a store blocks it for other threads
    c10d: Any = dist.distributed_c10d
    store = c10d._get_process_group_store(group).clone()
    of_group: Any = group
    options = getattr(of_group._get_backend(of_group._device_types[0]), "options", None)
    if timeout := getattr(options, "_timeout", None):  # the store has that of the world
        store.set_timeout(timeout)
    return store


def differences(
    rank: int, facts: Sequence[Sequence[str]], other: int, others: Sequence[Sequence[str]]
) -> str:
    """Return one line that says in what the calls of two ranks differ; "" if they are equal."""
    if rank > other:
        rank, facts, other, others = other, others, rank, facts
    mine, theirs = ({name: each for name, *each in call} for call in (facts, others))
    lines = []
    for name in dict.fromkeys([*mine, *theirs]):
        (content, words), (its, said) = (call.get(name, ["", "nothing"]) for call in (mine, theirs))
        if content != its:
            said += " with other contents" * (words == said)
            lines.append(f"{name} is {words} on rank {rank} and {said} on rank {other}")
    return f"ranks of the group make different calls: {'; '.join(lines)}" if lines else ""


def _conclusion(calls: dict[int, Any]) -> str:
    """Return the result of a meeting: a line if two calls differ, else ""."""
    first = min(calls)
    _, history, facts = calls[first]
    for rank, (_, its_history, its_facts) in calls.items():
        if its_history != history:
            return differences(first, facts, rank, its_facts) or (
                f"ranks of the group make different calls: an earlier call of rank {rank} was not "
                f"that of rank {first}"
            )
    return ""
