"""The log of one rank's fake GPU as an object, and what follows from it: which accesses of memory
race, and which captures of graphs are wrong.

Order comes from vector clocks. A stream runs what it is given in order; an event that is recorded
on it has its clock, and a stream that waits for the event, or a thread that has seen it complete,
knows all that was before. What a thread launches comes after all that the thread has seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Clock = dict[int, int]
"""How much of each stream is known to be done."""

# Kinds of events that a stream runs.
_WORK = ("launch", "copy", "fill", "access", "nccl")


@dataclass(frozen=True)
class Event:
    """A line of the log. `words` are those after the stream, if it has one, or after the kind."""

    thread: int
    kind: str
    stream: int
    words: tuple[str, ...]
    part: str

    @property
    def touched(self) -> Iterator[tuple[int, int, bool]]:
        """(start, end, whether it is written) of the memory that work on a stream uses."""
        words = self.words
        if self.kind == "access":
            for mode, start, end in (word.split(":") for word in words[1:]):
                yield int(start), int(end), mode == "w"
        elif self.kind == "nccl":
            yield int(words[5]), int(words[5]) + int(words[4]), words[0] != "send"
        elif self.kind == "copy":
            yield int(words[2]), int(words[2]) + int(words[1]), True
            yield int(words[3]), int(words[3]) + int(words[1]), False
        elif self.kind == "fill":
            yield int(words[1]), int(words[1]) + int(words[0]), True

    def __str__(self) -> str:
        name = {"access": self.words[:1], "nccl": self.words[:4:3]}.get(self.kind, self.words[:1])
        return f"{self.kind} {' '.join(name)} on stream {self.stream} in {self.part}"


@dataclass(frozen=True)
class Kernel:
    """A launch. `name` is as the compiler has it; of cuDNN it is "cudnn", without a grid."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    stream: int


@dataclass(frozen=True)
class Group:
    """Messages that NCCL starts together: (kind, peer, bytes), where the kind is send, recv or all.

    before: what had to be complete for it to begin. place: its last place on its stream.
    """

    communicator: str
    stream: int
    messages: tuple[tuple[str, int, int], ...]
    before: Clock
    place: int
    part: str

    def follows(self, other: Group) -> bool:
        """Whether the group begins after the other is complete, however long both take."""
        return self.before.get(other.stream, 0) >= other.place


@dataclass
class Log:
    """What one rank asked of CUDA, in order; `kernels`, `copies` and so on of one part of it."""

    events: list[Event]

    @classmethod
    def read(cls, path: Path) -> Log:
        """Of a file; empty where there is none."""
        events, part = list[Event](), ""
        for line in path.read_text().splitlines() if path.exists() else ():
            thread, kind, *words = line.split(" ")
            if kind == "mark":
                part = " ".join(words)
            # what has no stream first, or none
            none = ("malloc", "hostmalloc", "free", "sync", "query", "mode", "group", "mark")
            stream = -1
            if kind not in (*none, "communicator", "stub"):
                stream, *words = int(words[0]), *words[1:]
            events.append(Event(int(thread), kind, stream, tuple(words), part))
        return cls(events)

    def of(self, part: str | None, *kinds: str) -> list[Event]:
        """The events of these kinds, in one part or in all."""
        return [x for x in self.events if x.kind in kinds and part in (None, x.part)]

    def kernels(self, part: str | None = None) -> list[Kernel]:
        return [
            Kernel(" ".join(name), tuple(map(int, grid.split(","))), int(threads), int(size), x.stream)  # type: ignore[arg-type]  # fmt: skip  # noqa: E501
            for x in self.of(part, "launch")
            for grid, threads, size, *name in [x.words]
        ]

    def copies(self, part: str | None = None) -> list[Event]:
        """Copies between host and device."""
        return [x for x in self.of(part, "copy") if x.words[0].count("D") == 1]

    def syncs(self, part: str | None = None) -> list[Event]:
        """Where the host waited for the device."""
        return self.of(part, "sync")

    def allocations(self, part: str | None = None) -> list[Event]:
        """Where memory was asked of CUDA, or given back."""
        return self.of(part, "malloc", "hostmalloc", "free")

    def stubs(self) -> set[str]:
        """The functions that were called although the libraries do nothing in them."""
        return {x.words[0] for x in self.of(None, "stub")}

    def races(self) -> list[str]:
        """Pairs of accesses to the same memory by two streams, one of which writes, where nothing
        makes the second wait for the first: a message that is read before it has arrived, or a
        buffer that is used again before its last use is over.
        """
        found, uses = list[str](), list[_Use]()
        for event, clock, place in walk(self.events):
            for start, end, writes in event.touched:
                use, left = _Use(start, end, writes, event, place), list[_Use]()
                for other in uses:
                    known = clock.get(other.event.stream, 0) >= other.place
                    if not known and other.meets(use):
                        found.append(f"{event} does not wait for {other.event}")
                    # what is over and replaced can race no more
                    if not (known and other.inside(use) and (writes or not other.writes)):
                        left.append(other)
                uses = [*left, use]
        return list(dict.fromkeys(found))

    def groups(self) -> list[Group]:
        """NCCL's groups, in the order in which the host started them."""
        found, open_groups = list[Group](), dict[int, list[tuple[Event, Clock, int]]]()
        for event, clock, place in walk(self.events):
            mine = open_groups.setdefault(event.thread, [])
            if event.kind == "nccl":
                mine.append((event, dict(clock), place))
            elif event.kind == "group" and mine:
                first = mine[0][0]
                messages = [(x.words[0], int(x.words[3]), int(x.words[4])) for x, *_ in mine]
                found.append(
                    Group(first.words[1], first.stream, tuple(messages), mine[0][1], mine[-1][2],
                          first.part)
                )  # fmt: skip
                mine.clear()
        return found

    def capture_faults(self) -> list[str]:
        """What CUDA would reject in captures of graphs, or what they would lose: streams that are
        not joined at the end, waits for what was before the capture, and calls that capture forbids.
        """
        return list(_Captures(self.events).faults())


@dataclass(frozen=True, eq=False)
class _Use:
    start: int
    end: int
    writes: bool
    event: Event
    place: int

    def meets(self, other: _Use) -> bool:
        either = self.writes or other.writes
        return either and self.start < other.end and other.start < self.end

    def inside(self, other: _Use) -> bool:
        return other.start <= self.start and self.end <= other.end


def walk(events: list[Event]) -> Iterator[tuple[Event, Clock, int]]:
    """Each event with the clock of its stream and its place on the stream; the clock changes with
    the next event.
    """
    streams, threads, recorded = dict[int, Clock](), dict[int, Clock](), dict[str, Clock]()
    for event in events:
        clock, seen = streams.setdefault(event.stream, {}), threads.setdefault(event.thread, {})
        if event.kind in _WORK:
            _join(clock, seen)
            clock[event.stream] = clock.get(event.stream, 0) + 1
        elif event.kind == "record":
            recorded[event.words[0]] = clock | {}
        elif event.kind == "wait":
            _join(clock, recorded.get(event.words[0], {}))
        elif event.kind in ("sync", "query"):  # queries find all done
            known = {
                "event": lambda number: [recorded.get(number[0], {})],
                "stream": lambda number: [streams.get(int(number[0]), {})],
                "device": lambda _: list(streams.values()),
            }[event.words[0]](event.words[1:])
            for each in known:
                _join(seen, each)
        yield event, clock, clock.get(event.stream, 0)


def _join(clock: Clock, other: Clock) -> None:
    for stream, place in other.items():
        clock[stream] = max(clock.get(stream, 0), place)


_RELAXED = 2  # cudaStreamCaptureModeRelaxed; 0 is global, 1 is thread-local


@dataclass
class _Captures:
    """The captures of a log, one at a time."""

    events: list[Event]
    origin: int = -1  # the stream that began the capture which is open
    inside: dict[int, int] = field(default_factory=dict)  # its streams, with where each joined it
    captured: set[str] = field(default_factory=set)  # events that were recorded in it
    before: set[str] = field(default_factory=set)  # and those that were recorded outside
    modes: dict[int, int] = field(default_factory=dict)  # of threads

    def faults(self) -> Iterator[str]:
        for event, clock, place in walk(self.events):
            number = event.words[0] if event.words else ""
            if event.kind == "mode":
                self.modes[event.thread] = int(number)
            elif event.kind == "begin":
                self.origin, self.inside = event.stream, {event.stream: place}
            elif event.kind == "end":
                yield from self._lost(event, clock)
                self.origin, self.inside = -1, {}
                self.captured.clear()
            elif event.kind == "record":
                here, there = self.captured, self.before
                if event.stream not in self.inside:
                    here, there = there, here
                here.add(number)
                there.discard(number)
            elif event.kind == "wait":
                if number in self.captured:
                    self.inside.setdefault(event.stream, place)
                elif event.stream in self.inside and number in self.before:
                    yield f"stream {event.stream} waits for what was before the capture, in {event.part}"
            elif self.origin >= 0 and (why := self._forbidden(event)):
                yield f"{why} during a capture, in {event.part}"

    def _lost(self, event: Event, clock: Clock) -> Iterator[str]:
        last = dict[int, int]()
        for each, _, place in walk(self.events):
            if each is event:
                break
            if each.kind in _WORK:
                last[each.stream] = place
        for stream, joined in self.inside.items():
            if last.get(stream, 0) > max(joined, clock.get(stream, 0)):
                yield f"stream {stream} is not joined at the end of a capture, in {event.part}"

    def _forbidden(self, event: Event) -> str:
        kind, words = event.kind, event.words
        if kind in ("sync", "query"):
            if words[0] == "event" and words[1] in self.captured:
                return f"{kind} of an event of it"
            if words[0] == "stream" and int(words[1]) in self.inside:
                return f"{kind} of a stream of it"
        unsafe = kind in ("malloc", "hostmalloc", "free", "sync") or words[:1] == ("event",)
        if unsafe and self.modes.get(event.thread, 0) == 0:
            return f"{kind} in a thread that does not allow it"
        if kind == "copy" and event.stream in self.inside and "H" in words[0]:
            return "a copy of pageable memory"
        return ""
