"""Ranks that make different calls stop with one line, instead of filling each other's buffers with
the wrong tokens.

The first time that a rank makes a call with a new plan, dtype or shape, it meets the other ranks of
its group before any message leaves, and they compare their calls: `Agreement.check`. They meet in
the process group's store, not in a collective, so nothing waits for the device, no message can be
mistaken for another, and the wait has an end. A call that is known costs one look-up. No thread
runs and nothing asks the store between two meetings.

Every new call is compared by default. Packed documents bring a new plan with every microbatch, so a
Megatron job compares the first `FIRST` new calls of a group one by one, then one in
`--cp-ring-compare-every`. The digest covers all calls since the last comparison. So a difference
between two comparisons is found late, but it is found, and so are known calls that two ranks make
in different orders. Until then gloo delivers none of these messages, because their tag
(`Agreement.tag`) is a digest of all calls so far. NCCL has no tags.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cp_ring.errors import PlanError, one_line
from cp_ring.observe import debug
from cp_ring.runtime import RUNTIME

FIRST = 32
EVERY = 1
_MAX_KNOWN = 1024
_SAME = "same"  # what the ranks of a meeting learn where they brought the same values
_KEY = "cp_ring/"


class Fact(NamedTuple):
    """A fact that all ranks must agree on. `content` is compared, `words` are for the error
    message.
    """

    name: str
    content: str
    words: str

    @classmethod
    def of(cls, name: str, value: object) -> Fact:
        return cls(name, str(value), str(value))


class Meetings:
    """The meetings of one rank with the other ranks of its group about one topic. Only these ranks
    share `store`.
    """

    def __init__(self, store: Any, rank: int, size: int, topic: str):
        self._store, self._base = store, f"{_KEY}{topic}/"
        self.rank, self.size, self._number = rank, size, 0

    def meet(self, mine: object, conclude: Callable[[list[Any]], str], what: str) -> str:
        """Return the result of `conclude` for the list of the ranks' contributions. All ranks get
        the same result.

        The last rank that comes calls `conclude`; `mine`, this rank's contribution, reaches it as
        JSON. `what` says in an error what this rank does. Raises `PlanError` if a rank does not
        come before the timeout of the store.
        """
        base = f"{self._base}{self._number}"
        self._store.set(f"{base}/{self.rank}", json.dumps(mine))
        if self._store.add(base, 1) == self.size:
            keys = [f"{base}/{rank}" for rank in range(self.size)]
            brought = [json.loads(each) for each in self._store.multi_get(keys)]
            for key in (base, *keys):
                self._store.delete_key(key)
            self._store.set(f"{base}/end", conclude(brought))
        try:
            self._store.wait([f"{base}/end"])
        except RuntimeError as error:
            raise PlanError(
                f"rank {self.rank} of {self.size} {what}, and another rank of the group made none "
                f"within {self._store.timeout.total_seconds():g} s: all ranks must make the same "
                f"calls ({one_line(error)})"
            ) from None
        conclusion: bytes = self._store.get(f"{base}/end")
        # All ranks are here, so none still reads the conclusion of the previous meeting.
        if self.rank == 0 and self._number:
            self._store.delete_key(f"{self._base}{self._number - 1}/end")
        self._number += 1
        return conclusion.decode()


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
        self._history = hashlib.blake2b(digest_size=16)
        self._new = self.tag = 0

    def check(
        self,
        key: Hashable,
        facts: Callable[[], Sequence[Fact]],
        every: int = EVERY,
        values: Callable[[], str] = str,
    ) -> None:
        """Compare a new call with those of the other ranks; all ranks make their calls in the same
        order.

        Equal facts have equal keys. The first `FIRST` new calls are compared, then one in `every`;
        0 compares none. Under `debug.debugging` each call is compared.

        values: shows some values of this rank's tensors, which must differ between ranks; "" is not
        compared. Equal values give only a warning, because random shards of one seed may be equal.

        Raises:
            PlanError: on all ranks if two of them differ; the line names the facts and the values.
        """
        digest = self._known.get(key)
        meet = debug.enabled()
        if digest is None:
            self._new += 1
            meet = is_due(self._new, every)
            digest = self._known[key] = _digest(facts())
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        self._history.update(digest)
        self.tag = int.from_bytes(self._history.digest()[:3])
        if meet:
            self._meet(facts(), values())

    def _meet(self, facts: Sequence[Fact], values: str) -> None:
        mine = self._history.hexdigest(), values, facts
        words = ", ".join(f"{fact.name} {fact.words}" for fact in facts)
        line = self._meetings.meet(mine, _conclusion, f"made a call that is new to it ({words})")
        if line == _SAME and self._meetings.rank == 0:
            warn_of_same(self._meetings.size)
        if line not in ("", _SAME):  # after which the ranks may agree again
            self._known.clear()
            self._history, self.tag = hashlib.blake2b(digest_size=16), 0
            raise PlanError(line)


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreement] = RUNTIME.keep(
    weakref.WeakKeyDictionary()
)


def agreement_of(group: dist.ProcessGroup) -> Agreement:
    """Return the agreement of a process group, which all its transports share."""
    if group not in _agreements:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        _agreements[group] = Agreement(store_of(group), rank, size)
    return _agreements[group]


def begin_anew() -> None:
    """Make the next calls of this rank new to its groups, as if it had made none. All ranks call
    this at the same place.
    """
    for agreement in _agreements.values():
        agreement._known.clear()
        agreement._new = 0


def store_of(group: dist.ProcessGroup) -> Any:
    """Return a copy of the store of a process group, because a wait on a store blocks it for other
    threads.
    """
    c10d: Any = dist.distributed_c10d
    return c10d._get_process_group_store(group).clone()


def some_of(x: torch.Tensor) -> str:
    """Show some values of x; "" if they are equal, or cannot be read while a graph is captured."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return ""
    values = x.detach().flatten()[:: max(1, x.numel() // 64)].tolist()
    return str(values) if len({*values}) > 1 else ""


def warn_of_same(ranks: int) -> None:
    """Warn that all ranks pass the same tensors."""
    warnings.warn(
        f"all {ranks} ranks of the group pass the same tensors, which are taken for {ranks} parts "
        "of one sequence: cp_ring.shard cuts whole tensors into the parts of ranks",
        stacklevel=2,
    )


def differences(rank: int, facts: Sequence[Fact], other: int, others: Sequence[Fact]) -> str:
    """Return one line that says in what the calls of two ranks differ; "" if they are equal."""
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


def _conclusion(calls: list[Any]) -> str:
    """Return the result of a meeting: a line if two calls differ, `_SAME` if all ranks pass the
    same values, else "".
    """
    history, values, facts = calls[0]
    for rank, (its_history, _, its_facts) in enumerate(calls):
        if its_history != history:
            line = differences(
                0, [Fact(*fact) for fact in facts], rank, [Fact(*fact) for fact in its_facts]
            )
            return line or (
                f"ranks of the group make different calls: an earlier call of rank {rank} was not "
                "that of rank 0"
            )
    return _SAME if values and all(of == values for _, of, _ in calls) else ""


def _digest(facts: Sequence[Fact]) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for fact in facts:
        state.update(f"{fact.name}={fact.content};".encode())
    return state.digest()
