"""Ranks that make different calls stop with one line, instead of filling each other's buffers with
the wrong tokens.

The first time that a rank makes a call with a new plan, dtype or shape, it compares digests with
the other ranks of its group before any message leaves: `Agreement.check`. The ranks meet in the
process group's store, not in a collective, so nothing waits for the device, no message can be
mistaken for another, and the wait has an end. A call that is known costs one look-up. Where the
call is new to one rank and known to another, the second goes on to wait for messages; a thread of
it tells the first.

Every new call is compared by default. Packed documents bring a new plan with every microbatch, so a
Megatron job compares the first `FIRST` new calls of a group one by one, then one in
`--cp-ring-compare-every`. The digest covers all calls since the last comparison, so a difference
between two comparisons is found late, but it is found.

Known calls in another order are no new calls. Each rank keeps digests of its last calls, and its
thread compares them with those of its neighbors every few seconds, by the store. Until then gloo
delivers none of these messages: `Agreement.tag` is theirs, a digest of all calls so far. NCCL has
no tags.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from cp_ring.errors import PlanError
from cp_ring.observe import debug, threads
from cp_ring.runtime import RUNTIME

FIRST = 32
EVERY = 1
_MAX_KNOWN = 1024
_ALIKE, _SAME, _MOST = "alike", "same", 1 << 32
_KEY = "cp_ring/agreement/"
_TICK_S = 2.0
_PAST = 4096  # calls of which a digest is kept
EXIT_CODE = 3  # of a rank that waits for messages of another call, as of one that the watchdog ends


class Fact(NamedTuple):
    """Something that all ranks must agree on. `content` is compared, `words` are for the error
    message.
    """

    name: str
    content: str
    words: str

    @classmethod
    def of(cls, name: str, value: object) -> Fact:
        return cls(name, str(value), str(value))


class Agreement:
    """What one rank and the other ranks of its group have agreed on. `store` is shared by these
    ranks alone.
    """

    end: Callable[[int], object] = staticmethod(os._exit)

    def __init__(self, store: Any, rank: int, size: int):
        self._store, self._rank, self._size = store, rank, size
        self._known: OrderedDict[Hashable, bytes] = OrderedDict()
        self._history = hashlib.blake2b(digest_size=16)
        self._lock = Lock()  # of what the thread of `_look_out` reads
        self._calls = self._new = self._number = 0
        # Digests of the history after each of the last calls, and the number of calls, since it
        # began the last time.
        self._past: deque[bytes] = deque(maxlen=_PAST)
        self._since = self._resets = 0
        self._published = (-1, -1)
        self._line = ""  # in what the thread of `_look_out` has found the ranks to differ
        self._meeting = False
        self._current: Callable[[], Sequence[Fact]] = tuple
        threads.start("cp_ring agreement", _look_out, weakref.ref(self))

    def check(
        self,
        key: Hashable,
        facts: Callable[[], Sequence[Fact]],
        every: int = EVERY,
        values: Callable[[], str] = str,
    ) -> None:
        """Compares a call that is new with those of the other ranks; each rank makes its calls in
        the same order.

        Equal facts have equal keys. One in `every` new calls is compared after the first `FIRST`; 0
        compares none. Under `debug.debugging` each call is compared.

        values: of the tensors of this rank, which must not be those of all ranks; "" may be. A
            warning says so, because shards of random numbers may.

        Raises:
            PlanError: on all ranks, where two of them differ; the line names the facts and the
            values.
        """
        digest = self._known.get(key)
        if digest is None:
            self._new += 1
            meet = bool(every) and (self._new <= FIRST or self._new % every == 0)
            digest = self._known[key] = _digest(facts())
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            meet = False
            self._known.move_to_end(key)
        self._history.update(digest)
        with self._lock:
            self._meeting = meet or debug.enabled()
            self._current = facts
            self._calls += 1
            self._since += 1
            self._past.append(self._history.digest())
        if self._line:
            self._begin_anew(self._line)
        if self._meeting:
            self._meet(facts(), values())

    @property
    def tag(self) -> int:
        """24 bits that are equal on ranks that have made the same calls in the same order."""
        return int.from_bytes(self._past[-1][:3]) if self._past else 0

    def _begin_anew(self, line: str) -> NoReturn:
        """Raises `PlanError`, after which the ranks may agree again."""
        with self._lock:
            self._known.clear()
            self._history = hashlib.blake2b(digest_size=16)
            self._past.clear()
            self._since, self._resets, self._line = 0, self._resets + 1, ""
            self._meeting = False
        raise PlanError(line)

    def _meet(self, facts: Sequence[Fact], values: str) -> None:
        """Waits for all ranks. The first one leaves its call in the store, and each of the others
        compares its own with it.
        """
        base = f"{_KEY}{self._number}"
        mine = json.dumps([self._rank, self._calls, self._history.hexdigest(), values, facts])
        first = json.loads(self._store.compare_set(base, "", mine))
        if first[2] != self._history.hexdigest():
            self._store.set(base + "/end", _differences(first, json.loads(mine)))
        else:  # one number counts the ranks, and those of the same values
            count = self._store.add(base + "/alike", 1 + _MOST * (first[3] == values != ""))
            same, alike = divmod(count, _MOST)
            if alike == self._size:
                self._store.set(base + "/end", _SAME if same == alike else _ALIKE)
        self._wait(base, facts)
        line = self._store.get(base + "/end").decode()
        # all ranks are here, so none reads the last comparison any more
        if self._rank == 0 and self._number:
            for name in ("", "/end", "/alike"):
                self._store.delete_key(f"{_KEY}{self._number - 1}{name}")
        if line == _SAME and self._rank == 0:
            warn_of_same(self._size)
        with self._lock:
            self._number += 1
            self._meeting = line not in (_ALIKE, _SAME)  # until the histories that differ are gone
        if line not in (_ALIKE, _SAME):
            self._begin_anew(line)

    def _tell_of_known_call(self) -> str:
        """Tells a rank that waits for a comparison that this rank knew its own call, and returns
        the line, else "".
        """
        with self._lock:
            base = f"{_KEY}{self._number}"
            calls = self._calls
            meeting = self._meeting
            current = self._current
        if meeting or not self._store.check([base]):
            return ""
        first = json.loads(self._store.get(base))
        if first[1] > calls:
            return ""  # that rank is ahead
        line = _differences(first, json.loads(json.dumps([self._rank, calls, "", current()])))
        self._store.set(base + "/end", line)
        return line

    def _compare_past(self) -> str:
        """Compares the last calls with those of the ranks beside this one; a line if they differ,
        which `check` raises next.
        """
        with self._lock:
            place, past, meeting = (self._resets, self._since), list(self._past), self._meeting
        if meeting:
            return ""  # the main thread waits, and holds the store
        if place != self._published:
            self._store.set(
                f"{_KEY}past/{self._rank}", json.dumps([*place, past[-1].hex() if past else ""])
            )
            self._published = place
        for other in {(self._rank - 1) % self._size, (self._rank + 1) % self._size} - {self._rank}:
            if not self._store.check([f"{_KEY}past/{other}"]):
                continue
            resets, since, digest = json.loads(self._store.get(f"{_KEY}past/{other}"))
            back = place[1] - since
            if (
                resets == place[0]
                and since
                and 0 <= back < len(past)
                and past[-1 - back].hex() != digest
            ):
                self._line = (
                    f"ranks of the group make different calls: the first {since} of rank "
                    f"{min(self._rank, other)} are not those of rank {max(self._rank, other)} in "
                    "the same order"
                )
        return self._line

    def _wait(self, base: str, facts: Sequence[Fact]) -> None:
        try:
            self._store.wait([base + "/end"])
        except RuntimeError as error:
            mine = ", ".join(f"{fact.name} {fact.words}" for fact in facts)
            raise PlanError(
                f"rank {self._rank} of {self._size} made a call that is new to it ({mine}), and "
                "another rank of the group made none within "
                f"{self._store.timeout.total_seconds():g} s: all ranks must make the same calls "
                f"({error})"
            ) from None


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreement] = RUNTIME.keep(
    weakref.WeakKeyDictionary()
)


def agreement_of(group: dist.ProcessGroup) -> Agreement:
    """The agreement of a process group, which all its transports share."""
    if group not in _agreements:
        # A copy, because a wait blocks a store for other threads.
        c10d: Any = dist.distributed_c10d
        store = c10d._get_process_group_store(group).clone()
        _agreements[group] = Agreement(store, dist.get_rank(group), dist.get_world_size(group))
    return _agreements[group]


def some_of(x: torch.Tensor) -> str:
    """Some values of x; "" where they are equal, or cannot be read while a graph is captured."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return ""
    values = x.detach().flatten()[:: max(1, x.numel() // 64)].tolist()
    return str(values) if len({*values}) > 1 else ""


def warn_of_same(ranks: int) -> None:
    """Says that all ranks pass the same tensors."""
    warnings.warn(
        f"all {ranks} ranks of the group pass the same tensors, which are taken for {ranks} parts "
        "of one sequence: cp_ring.shard cuts whole tensors into the parts of ranks",
        stacklevel=2,
    )


def differences(rank: int, facts: Sequence[Fact], other: int, others: Sequence[Fact]) -> str:
    """One line that says in what the calls of two ranks differ; "" where they are alike."""
    if rank > other:
        rank, facts, other, others = other, others, rank, facts
    mine, theirs = ({fact.name: fact for fact in call} for call in (facts, others))
    nothing = Fact("", "", "nothing")
    pairs = [
        (name, mine.get(name, nothing), theirs.get(name, nothing))
        for name in dict.fromkeys([*mine, *theirs])
    ]
    lines = [
        f"{name} is {a.words} on rank {rank} and "
        f"{b.words}{' with other contents' * (a.words == b.words)} on rank {other}"
        for name, a, b in pairs
        if a.content != b.content
    ]
    return f"ranks of the group make different calls: {'; '.join(lines)}" if lines else ""


def _differences(first: list[Any], mine: list[Any]) -> str:
    (rank, *_, facts), (other, *_, others) = first, mine
    line = differences(
        rank, [Fact(*fact) for fact in facts], other, [Fact(*fact) for fact in others]
    )
    return (
        line
        or f"ranks of the group make different calls: an earlier call of rank {other} was not "
        f"that of rank {rank}"
    )


def _look_out(agreement: weakref.ref[Agreement]) -> None:
    """The thread of a rank that waits for messages of a call which it knows, while another rank's
    call is new to that rank.

    It prints in what the calls differ, and tells the other rank, which ends. It asks the store only
    while no call is made.
    """
    calls, printed = -1, ""
    while threads.sleep(_TICK_S):
        alive = agreement()
        if alive is None:
            return
        if alive._calls == calls:
            try:
                line = alive._tell_of_known_call()
            except RuntimeError:  # the store is gone, and with it the job
                return
            if line:
                _print(alive._rank, line)
                return
        try:
            line = alive._compare_past()
        except RuntimeError:
            return
        if line and line == printed and alive._calls == calls:
            alive.end(EXIT_CODE)  # it waits for messages that never come
        if line and line != printed:
            _print(alive._rank, line)
        printed, calls = line, alive._calls
        del alive


def _print(rank: int, line: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be a file on a full disk
        print(f"cp_ring: rank {rank}: {line}", file=sys.stderr, flush=True)


def _digest(facts: Sequence[Fact]) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for fact in facts:
        state.update(f"{fact.name}={fact.content};".encode())
    return state.digest()
