"""The log of one rank's fake GPU as an object, and what follows from it: which accesses of memory
race, and which captures of graphs are wrong.

Order comes from vector clocks. A stream runs what it is given in order; an event that is recorded
on it has its clock, and a stream that waits for the event, or a thread that does, knows all that
was before. What a thread launches comes after all that the thread has seen.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

Clock = dict[int, int]
"""How much of each stream is known to be done."""

# Kinds of events that a stream runs.
WORK = ("launch", "copy", "fill", "access", "nccl")


@dataclass(frozen=True)
class Event:
    """A line of the log. `words` are those after the stream, if it has one, or after the kind."""

    thread: int
    kind: str
    stream: int
    words: tuple[str, ...]
    part: str

    @property
    def touched(self):
        """(mode, start, end) of the memory that work on a stream uses; the mode is n for what torch
        has newly allocated, w for what is written, and r for what is read.
        """
        words = self.words
        if self.kind == "access":
            for mode, start, end in (word.split(":") for word in words[1:]):
                yield mode, int(start), int(end)
        elif self.kind == "nccl":
            yield "r" if words[0] == "send" else "w", int(words[5]), int(words[5]) + int(words[4])
        elif self.kind == "copy":
            yield "w", int(words[2]), int(words[2]) + int(words[1])
            yield "r", int(words[3]), int(words[3]) + int(words[1])
        elif self.kind == "fill":
            yield "w", int(words[1]), int(words[1]) + int(words[0])

    def __str__(self):
        name = {"access": self.words[:1], "nccl": self.words[:4:3]}.get(self.kind, self.words[:1])
        return f"{self.kind} {' '.join(name)} on stream {self.stream} in {self.part}"


@dataclass(frozen=True)
class Kernel:
    """A launch. `name` is as the compiler has it; of cuDNN it is "cudnn", without a grid."""

    name: str
    grid: tuple[int, ...]
    threads: int
    shared: int
    stream: int


@dataclass(frozen=True)
class Group:
    """Messages that NCCL starts together: (kind, peer, bytes), the kind is send, recv or all."""

    communicator: str
    messages: tuple[tuple[str, int, int], ...]
    first: Step
    last: Step

    @property
    def part(self):
        return self.first.event.part

    def follows(self, other):
        """Whether the group begins after the other is complete, however long both take."""
        return self.first.knows(other.last)


@dataclass
class Log:
    """What one rank asked of CUDA, in order; `kernels`, `copies` and so on of one part of it."""

    events: list[Event]

    @classmethod
    def read(cls, path):
        """Of a file; empty where there is none."""
        events, part = [], ""
        for line in path.read_text().splitlines() if path.exists() else ():
            thread, kind, *words = line.split(" ")
            if kind == "mark":
                part = " ".join(words)
            # what has no stream first, or none
            none = (
                "malloc",
                "hostmalloc",
                "free",
                "sync",
                "query",
                "mode",
                "group",
                "mark",
                "rates",
            )
            stream = -1
            if kind not in (*none, "communicator", "stub"):
                stream, *words = int(words[0]), *words[1:]
            events.append(Event(int(thread), kind, stream, tuple(words), part))
        return cls(events)

    def of(self, part, *kinds):
        """The events of these kinds, in one part or in all."""
        return [x for x in self.events if x.kind in kinds and part in (None, x.part)]

    def kernels(self, part=None):
        found = []
        for event in self.of(part, "launch"):
            grid, threads, size, *name = event.words
            blocks = tuple(map(int, grid.split(",")))
            found.append(Kernel(" ".join(name), blocks, int(threads), int(size), event.stream))
        return found

    def copies(self, part=None):
        """Copies between host and device."""
        return [x for x in self.of(part, "copy") if x.words[0].count("D") == 1]

    def syncs(self, part=None):
        """Where the host waited for the device."""
        return self.of(part, "sync")

    def allocations(self, part=None):
        """Where memory was asked of CUDA, or given back."""
        return self.of(part, "malloc", "hostmalloc", "free")

    def unknown(self):
        """Kernels of which the log does not say what memory they use."""
        found, waiting = [], defaultdict(list)
        for event in self.events:
            place = event.thread, event.stream
            if event.kind == "launch":
                waiting[place].append(event)
            elif event.kind == "access":
                waiting[place].clear()
            elif event.kind in ("record", "wait"):
                found += [str(x) for x in waiting.pop(place, ())]
        return found

    def stubs(self):
        """The functions that were called although the libraries do nothing in them."""
        return {x.words[0] for x in self.of(None, "stub")}

    @cached_property
    def races(self):
        """Pairs of accesses to the same memory by two streams, one of which writes, where nothing
        makes the second wait for the first: a message that is read before it has arrived, or a
        buffer that is used again before its last use is over.
        """
        found, of_graphs = [], defaultdict(list)
        for step in walk(self.events):
            for mode, start, end in step.event.touched:
                use, left = _Use(start, end, mode == "w", step), []
                # a graph that is captured runs later: what is in it is ordered within it alone
                for other in of_graphs[step.capture]:
                    known = step.knows(other.step)
                    if mode == "n":
                        # what was freed; torch's allocator has asked whether its uses are over
                        over = use.overlaps(other) and (known or step.asked(other.step))
                    else:
                        if not known and use.overlaps(other) and (use.writes or other.writes):
                            found.append(f"{step.event} does not wait for {other.step.event}")
                        # what is over and replaced can race no more
                        over = known and other.inside(use) and (use.writes or not other.writes)
                    if not over:
                        left.append(other)
                of_graphs[step.capture] = left if mode == "n" else [*left, use]
        return list(dict.fromkeys(found))

    @cached_property
    def groups(self):
        """NCCL's groups, in the order in which the host started them."""
        found, open_groups = [], defaultdict(list)
        for step in walk(self.events):
            mine = open_groups[step.event.thread]
            if step.event.kind == "nccl":
                mine.append(step.kept())
            elif step.event.kind == "group" and mine:
                words = [x.event.words for x in mine]
                messages = tuple(
                    (kind, int(peer), int(size)) for kind, _, _, peer, size, _ in words
                )
                found.append(Group(words[0][1], messages, mine[0], mine[-1]))
                mine.clear()
        return found

    @cached_property
    def capture_faults(self):
        """What CUDA would reject in captures of graphs, or what they would lose: streams that are
        not joined at the end, waits for what was before the capture, and calls that it forbids.
        """
        return list(_capture_faults(self.events))


@dataclass
class Step:
    """An event in its order. `clock` is that of its stream and changes with the next event; `place`
    is the event's on the stream; `capture` numbers the capture that records it, 0 is none.
    `found_done` is what the thread has asked CUDA about, which on the fake GPU is always done.
    """

    event: Event
    clock: Clock
    place: int
    capture: int
    found_done: Clock

    def kept(self):
        """With a clock that does not change."""
        return replace(self, clock=dict(self.clock))

    def knows(self, other):
        """Whether the other event is over when this one begins."""
        return self.clock.get(other.event.stream, 0) >= other.place

    def asked(self, other):
        """Whether the thread has been told that the other event is over. On a GPU it might not be
        yet, and the thread would do something else: it does not make this event wait.
        """
        return self.found_done.get(other.event.stream, 0) >= other.place


@dataclass(frozen=True, eq=False)
class _Use:
    start: int
    end: int
    writes: bool
    step: Step

    def overlaps(self, other):
        return self.start < other.end and other.start < self.end

    def inside(self, other):
        return other.start <= self.start and self.end <= other.end


def walk(events):
    """The events in order."""
    streams, threads = defaultdict(dict), defaultdict(dict)
    asked = defaultdict(dict)
    recorded, of_events = defaultdict(dict), {}
    capturing, captures = {}, 0
    for event in events:
        clock, seen = streams[event.stream], threads[event.thread]
        number = event.words[0] if event.words else ""
        if event.kind in WORK:
            _join(clock, seen)
            clock[event.stream] = clock.get(event.stream, 0) + 1
        elif event.kind == "record":
            recorded[number] = dict(clock)
            of_events[number] = capturing.get(event.stream, 0)
        elif event.kind == "wait":
            _join(clock, recorded[number])
            if of_events.get(number) in capturing.values():
                capturing.setdefault(event.stream, of_events[number])
        elif event.kind == "begin":
            captures += 1
            capturing[event.stream] = captures
        elif event.kind in ("sync", "query"):
            known = asked[event.thread] if event.kind == "query" else seen
            what = event.words[-1]
            if number == "event":
                _join(known, recorded[what])
            else:
                for each in [streams[int(what)]] if number == "stream" else list(streams.values()):
                    _join(known, each)
        capture = capturing.get(event.stream, 0)
        yield Step(event, clock, clock.get(event.stream, 0), capture, asked[event.thread])
        if event.kind == "end":
            capturing = {x: y for x, y in capturing.items() if y != capture}


def _join(clock, other):
    for stream, place in other.items():
        clock[stream] = max(clock.get(stream, 0), place)


def _capture_faults(events):
    now, modes = 0, {}  # the capture that is open; the modes of threads
    of_events, streams = {}, {}  # in which capture they are
    last = {}  # the place of the last captured work of a stream
    for step in walk(events):
        event, where = step.event, f", in {step.event.part}"
        number = event.words[0] if event.words else ""
        if step.capture:
            streams[event.stream] = step.capture
        if event.kind == "mode":
            modes[event.thread] = int(number)
        elif event.kind == "begin":
            now, last = step.capture, {}
        elif event.kind == "end":
            for stream, place in last.items():
                if step.clock.get(stream, 0) < place:
                    yield f"stream {stream} is not joined at the end of a capture{where}"
            now = 0
        elif event.kind == "record":
            of_events[number] = step.capture
        elif event.kind == "wait":
            if step.capture and of_events.get(number, now) != now:
                yield f"stream {event.stream} waits for what was before the capture{where}"
        elif now:
            if step.capture and event.kind in WORK:
                last[event.stream] = step.place
            of_it = event.words[-1:] and (
                now == of_events.get(event.words[-1])
                if number == "event"
                else number == "stream" and now == streams.get(int(event.words[-1]))
            )
            asks = event.kind in ("sync", "query")
            unsafe = event.kind in ("sync", "malloc", "hostmalloc", "free") or number == "event"
            if asks and of_it:
                yield f"{event.kind} of the capture's own {number}{where}"
            elif unsafe and modes.get(event.thread, 0) == 0:
                yield f"{event.kind} during a capture, in a thread that does not allow it{where}"
            elif step.capture and event.kind == "copy" and "H" in number:
                yield f"a copy of pageable memory during a capture{where}"
