"""Reports which rank is stuck, and where, when a hop waits for too long. Then it ends the process.

The hot path only writes notes into `WATCH`: the layer that runs, and the batch of messages that it
waits for. A thread of each rank reads these notes. The first thread that finds that its rank waits
for too long tells all others through the process group's store. Then every rank prints where it is,
the lowest rank names the first stuck rank, and all exit, so that a launcher can start them again.

A collective outside of the ring may take its time, while rank 0 tokenizes or a file system is slow:
lines say once where every rank is, and the job goes on. A rank that fails tells the others, because
some backends do not report that a peer is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_ring.observe import threads
from cp_ring.runtime import RUNTIME

EXIT_CODE = 3
_KEY = "cp_ring/watchdog/"
_COLLECTIVES = ("/torch/distributed/", "/cp_ring/comm/agreement.py")
_GRACE_S = 3.0  # long enough for all ranks of a job to write to the store and to read from it


@dataclass(frozen=True)
class Place:
    """The place of a layer's attention in a training step. Microbatches count from 0 in each step,
    in the order of this rank.
    """

    step: int = 0
    layer: int | str = 0
    microbatch: int = 0

    def __str__(self) -> str:
        words = f"step {self.step}, microbatch {self.microbatch}, layer {self.layer}"
        return words * (self != Place())


@dataclass
class Watch:
    """Notes of the hot path. `waits` has the batch that each waiting thread waits for, and since
    when.

    Threads of one process may wait at the same time, each in a group of its own; `place` is then
    the place of the last one.
    """

    place: Place = Place()
    backward: bool = False
    waits: dict[int, tuple[Any, float]] = field(default_factory=dict)
    last: tuple[Any, ...] | None = None
    sampled: tuple[Any, ...] | None = None

    def begin(self, batch: Any, works: Sequence[Any]) -> None:
        """Note that this rank starts to wait for a batch of messages."""
        now = time.monotonic()
        self.waits[threading.get_ident()] = batch, now
        first = (batch.receives or batch.sends)[0][1][0]
        sampled = _dogs and self.sampled is None and first.is_cuda
        if sampled and not torch.cuda.is_current_stream_capturing():  # graphs never complete
            # on CUDA `wait` returns at once; the device waits. A watchdog frees the works.
            self.sampled = (_describe(self, batch), now, works, first.device)

    def end(self) -> None:
        """Note that the batch of this thread has arrived."""
        batch, _ = self.waits.pop(threading.get_ident())
        self.last = (self.place, self.backward, batch.kind, batch.hop)

    def give_up(self) -> None:
        """Note that the wait of this thread has failed."""
        self.waits.pop(threading.get_ident(), None)

    def longest(self) -> tuple[Any, float]:
        """Return the batch that a thread has waited for longest, and since when; (None, 0.0) if no
        thread waits.
        """
        return min(list(self.waits.values()), key=lambda wait: wait[1], default=(None, 0.0))


WATCH = RUNTIME.keep(Watch())
_calls: Counter[int | str] = RUNTIME.keep(Counter())


def enter(layer: int | str, step: int = 0) -> Place:
    """Note that a layer's attention begins. Returns its place, which its backward needs too."""
    if step != WATCH.place.step:
        _calls.clear()
    WATCH.place = Place(step, layer, _calls[layer])
    _calls[layer] += 1
    return WATCH.place


def rest() -> None:
    """Reset the notes after a trial run of attention."""
    WATCH.last = WATCH.sampled = None
    _calls.clear()


def _describe(watch: Watch, batch: Any) -> dict[str, Any]:
    """Return the batch that a rank waits for as data without tensors."""
    return _at(watch.place, watch.backward, batch.kind, batch.hop) | {
        "from": [[transfer.peer, transfer.ranges] for transfer, _ in batch.receives],
        "to": [[transfer.peer, transfer.ranges] for transfer, _ in batch.sends],
        "ranks": batch.ranks,
    }


def _at(place: Place, backward: bool, kind: str, hop: int) -> dict[str, Any]:
    direction = "backward" if backward else "forward"
    return vars(place) | {"direction": direction, "kind": kind, "hop": hop}


class Watchdog:
    """The thread of one rank.

    Attributes:
        timeout: seconds that a hop may wait.
        store: the process group's store; only this thread uses this handle.
        end: called with the exit code.
    """

    def __init__(
        self, timeout: float, rank: int, size: int, store: Any, end: Callable[[int], Any] = os._exit
    ):
        self.rank, self.size, self.store, self.end = rank, size, store, end
        self.set_timeout(timeout)
        self._awake = self._since = time.monotonic()
        self._stack: tuple[Any, ...] = ()
        self._asked = 0
        self._main = threading.main_thread().ident or 0

    def set_timeout(self, timeout: float) -> None:
        """Set another timeout, in force from the next tick on."""
        self.timeout, self.tick = timeout, min(max(timeout / 20, 0.2), 5.0)

    def run(self, alive: Callable[[], bool]) -> None:
        """Check the notes at every tick, until the process group is gone."""
        while alive() and self._sleep():
            if self.waited() > self.timeout or self._has("fired"):
                self.report()
                return
            if self._has("failed"):
                self._end_with_another()
                return
            self._report_collective()

    def _sleep(self) -> bool:
        """Sleep for a tick. Return False when the process ends.

        If the tick took much longer, the process was stopped (SIGSTOP, a suspended Slurm job), most
        likely with all the others: its wait counts from now on.
        """
        begun = time.monotonic()
        going_on = threads.sleep(self.tick)
        if time.monotonic() - begun > self.tick + max(self.tick, 1.0):
            self._awake = time.monotonic()
        return going_on

    def waited(self) -> float:
        """Return the seconds of this rank's present wait."""
        now, since, sampled = time.monotonic(), WATCH.longest()[1], WATCH.sampled
        if sampled is not None and _completed(*sampled[2:]):
            WATCH.sampled = sampled = None
        start = min(filter(None, (since, sampled and sampled[1])), default=now)
        return now - max(start, self._awake)

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([_KEY + key]))
        except RuntimeError:  # the store is gone, because the rank that held it has ended
            return False

    def _end_with_another(self) -> None:
        """End the process, which may wait for ever for the rank that has failed. Most ranks find
        out by themselves first.
        """
        said = self.store.get(_KEY + "failed").decode()
        if not said.startswith(f"rank {self.rank}:") and threads.sleep(_GRACE_S):
            _say(f"cp_ring: watchdog: rank {self.rank} ends, because another has failed: {said}")
            self.end(EXIT_CODE)

    def _report_collective(self) -> None:
        """Print where this rank is, once in a collective that takes longer than a hop may. It asks
        all other ranks for the same, because the one that they wait for may be in no collective.
        """
        frame = _collective(sys._current_frames().get(self._main))
        stack = (id(frame), frame.f_lasti) if frame is not None else ()
        if stack != self._stack:
            self._stack, self._since = stack, time.monotonic()
        question = f"asked {self._asked}"
        late = stack and time.monotonic() - max(self._since, self._awake) > self.timeout
        if late:
            with contextlib.suppress(RuntimeError):  # the store is gone
                self.store.set(_KEY + question, "")
        if late or self._has(question):
            self._asked += 1
            self._since = math.inf
            _say(f"cp_ring: watchdog: rank {self.rank} {sentence(self.where())}; the job goes on")

    def report(self) -> None:
        """Print where this rank is, read where the others are, let one rank name the first stuck
        rank, and end the process.
        """
        try:
            mine = self.where()
            _say(f"cp_ring: watchdog: rank {self.rank} {sentence(mine)}")
            self.store.set(_KEY + str(self.rank), json.dumps(mine))
            self.store.set(_KEY + "fired", "1")
            time.sleep(self.tick + _GRACE_S)
            reports = {
                rank: json.loads(self.store.get(_KEY + str(rank)))
                for rank in range(self.size)
                if self.store.check([_KEY + str(rank)])
            }
            if self.rank == min(reports):
                line = verdict(reports, self.size)
                _say(f"cp_ring: watchdog: {line}; ending the job")
                self.store.set(_KEY + "said", "1")
            else:
                end = time.monotonic() + _GRACE_S
                while time.monotonic() < end and not self.store.check([_KEY + "said"]):
                    time.sleep(0.1)
        except RuntimeError as error:
            _say(f"cp_ring: watchdog: rank {self.rank} cannot reach the others: {error}")
        finally:
            self.end(EXIT_CODE)

    def where(self) -> dict[str, Any]:
        """Return the batch that this rank waits for, or the code that it runs."""
        (batch, since), sampled, last = WATCH.longest(), WATCH.sampled, WATCH.last
        frame = sys._current_frames().get(self._main)
        mine: dict[str, Any] = {"waits": "", "at": _position(frame)}
        found = None if batch is None else _describe(WATCH, batch)
        if found is None and sampled is not None:
            found, since = sampled[:2]
        if found is not None:
            return mine | found | {"waits": "hop", "seconds": time.monotonic() - since}
        if last is not None:
            mine |= _at(*last)
        if _collective(frame) is not None:
            mine["waits"] = "collective"
        return mine


def _completed(works: Sequence[Any], device: torch.device) -> bool:
    """Return True if the messages are complete. The question is asked on their own device, because
    it would take memory of another one, and so that it breaks no CUDA graph that another thread
    captures.

    The device of a new thread is the first one, which belongs to another rank.
    """
    mode = ctypes.c_int(2)  # cudaStreamCaptureModeRelaxed
    with contextlib.suppress(AttributeError):  # torch without CUDA
        ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    with torch.cuda.device(device):
        return all(work.is_completed() for work in works)


def _say(line: str) -> None:
    """Print to standard error. If that is a file on a full disk, the other ranks must still be
    told.
    """
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def sentence(report: dict[str, Any]) -> str:
    """Return a rank's report as a sentence."""
    place = ""
    if "hop" in report:
        place = (
            "step {step}, microbatch {microbatch}, layer {layer}, {direction}, hop {hop}".format(
                **report
            )
        )
    if report["waits"] == "hop":
        transfers = [
            f"{word} rank {_peer(report, peer)} tokens "
            f"{', '.join(f'{start}:{end}' for start, end in ranges)}"
            for word in ("from", "to")
            for peer, ranges in report[word]
        ]
        return (
            f"waits for {report['seconds']:.0f} s: {place}: {report['kind']} {'; '.join(transfers)}"
        )
    last = f"; its last hop was {place}" if place else ""
    if report["waits"] == "collective":
        return f"waits in a collective, {report['at']}{last}"
    return f"does not wait for anyone: it is in {report['at']}{last}"


def verdict(reports: dict[int, dict[str, Any]], size: int) -> str:
    """Name the first stuck rank: a rank that is gone, else one that does not wait, else the one
    that is furthest behind.
    """
    gone = [rank for rank in range(size) if rank not in reports]
    if gone:
        return f"first stuck: rank {gone[0]}, which does not answer" + (
            f" (nor do {gone[1:]})" if gone[1:] else ""
        )
    busy = [rank for rank, report in reports.items() if not report["waits"]] or list(reports)
    first = min(busy, key=lambda rank: _progress(reports[rank]))
    waiting = sorted(rank for rank, report in reports.items() if _waits_for(report, first))
    others = f"; waiting for it: {', '.join(f'rank {rank}' for rank in waiting)}" if waiting else ""
    return f"first stuck: rank {first}, which {sentence(reports[first])}{others}"


def _waits_for(report: dict[str, Any], rank: int) -> bool:
    return report["waits"] == "hop" and any(
        _peer(report, peer) == rank for word in ("from", "to") for peer, _ in report[word]
    )


def _peer(report: dict[str, Any], peer: int) -> int:
    """Return the rank in the job of the rank `peer` of the ring's group."""
    return int(report["ranks"][peer]) if report.get("ranks") else peer


def _progress(report: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key that sorts reports by progress. In backward, layers run in descending order."""
    if "hop" not in report:
        return (-1,)
    # those that predict follow the decoder's
    layer = report["layer"] if isinstance(report["layer"], int) else sys.maxsize
    backward = report["direction"] == "backward"
    return (
        report["step"],
        backward,
        -layer if backward else layer,
        report["microbatch"],
        report["hop"],
        -report.get("seconds", 0.0),
    )


def _collective(frame: FrameType | None) -> FrameType | None:
    """Return the frame of torch.distributed near the top of the stack, or None."""
    for _ in range(4):
        if frame is None:
            return None
        if any(place in frame.f_code.co_filename for place in _COLLECTIVES):
            return frame
        frame = frame.f_back
    return None


def _position(frame: FrameType | None) -> str:
    """Return the position of a thread: its innermost function outside of torch, with file and line
    number.
    """
    while frame is not None and "/torch/" in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    if frame is None:
        return "no Python code"
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def tell_failure(why: str) -> None:
    """Tell the watchdogs of all ranks that this rank has failed and ends with an error."""
    with contextlib.suppress(RuntimeError):  # the store is gone
        store = dist.distributed_c10d._get_default_store()
        store.compare_set(_KEY + "failed", "", f"rank {dist.get_rank()}: {why}")


_dogs: WeakKeyDictionary[Any, Watchdog] = RUNTIME.of_process(WeakKeyDictionary())
"""The watchdogs by default process group, which may be destroyed."""


def start(timeout: float) -> None:
    """Start the thread for the present default process group, unless `timeout` is 0 or there is no
    group.

    A rank that then waits for a hop for longer than `timeout` seconds is reported, and the process
    ends with `EXIT_CODE`. If the thread runs already, `timeout` replaces the earlier one.
    """
    if not timeout or not dist.is_initialized():
        return
    c10d: Any = dist.distributed_c10d
    group = c10d._get_default_group()
    if group in _dogs:
        _dogs[group].set_timeout(timeout)
        return
    watched = weakref.ref(group)
    WATCH.__init__()  # type: ignore[misc]
    store = c10d._get_default_store().clone()
    dog = _dogs[group] = Watchdog(timeout, dist.get_rank(), dist.get_world_size(), store)

    def alive() -> bool:
        return dist.is_initialized() and dist.distributed_c10d._get_default_group() is watched()

    threads.start("cp_ring watchdog", dog.run, alive)
