"""A trace of all ranks on one clock, in the Chrome format that Perfetto (https://ui.perfetto.dev)
and chrome://tracing show.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Each
rank is a process. Its thread `attention` has calls, which hold hops and waits; hops hold kernel
calls and merges. Other threads have the messages from and to each other rank. An arrow leads from a
message at its sender to the same message at its receiver.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.observe.timed_messages import RankTimes, TimedMessage, messages
from cp_ring.observe.timing import CallTimes

FORMAT = "cp_ring trace 1"
ATTENTION, FROM, TO = 1, 1000, 100_000
"""Threads of a rank: attention, and those of messages from and to rank r, FROM + r and TO + r."""

_RED = "terrible"  # a color name of the format


def write(path: Path, steps: Mapping[int, Sequence[RankTimes]], clock_error: float) -> None:
    """Writes the trace of some steps; times of all ranks count from the clock of one, with
    `clock_error` seconds at most.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome(steps, clock_error)))


def chrome(steps: Mapping[int, Sequence[RankTimes]], clock_error: float) -> dict[str, Any]:
    """The trace as JSON."""
    every = [each for ranks in steps.values() for each in ranks]
    first = min((call.begin - each.clock for each in every for call in each.calls), default=0.0)
    ids = count(1)  # Perfetto drops arrows whose identifiers are not whole numbers
    # a sender may be in the next step when the receiver is not
    free: defaultdict[tuple[int, int], float] = defaultdict(float)
    events = [
        event for _, ranks in sorted(steps.items()) for event in _events(ranks, first, ids, free)
    ]
    names = {each.rank: each.host for each in every}
    peers = {(event["pid"], event["tid"]) for event in events if event["tid"] != ATTENTION}
    labels = [
        _meta(rank, 0, "process_name", f"rank {rank} ({host})")
        for rank, host in sorted(names.items())
    ]
    labels += [_meta(rank, ATTENTION, "thread_name", "attention") for rank in sorted(names)]
    labels += [
        _meta(
            rank,
            thread,
            "thread_name",
            f"to rank {thread - TO}" if thread >= TO else f"from rank {thread - FROM}",
        )
        for rank, thread in sorted(peers)
    ]
    about = {
        "format": FORMAT,
        "steps": sorted(steps),
        "clock_error_us": round(clock_error * 1e6, 1),
        "hosts": names,
    }
    return {
        "traceEvents": labels + sorted(events, key=lambda event: event["ts"]),
        "displayTimeUnit": "ms",
        "otherData": about,
    }


def _meta(rank: int, thread: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": {"name": name}}


def _slice(
    rank: int,
    thread: int,
    name: str,
    category: str,
    begin: float,
    end: float,
    **args: Any,
) -> dict[str, Any]:
    """A slice of the trace; begin and end in seconds."""
    begin_us = round(begin * 1e6, 3)
    end_us = round(max(begin, end) * 1e6, 3)
    event = {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": begin_us,
        "dur": round(end_us - begin_us, 3),
    }
    return {**event, "args": args}


def _events(
    ranks: Sequence[RankTimes],
    first: float,
    ids: Iterator[int],
    free: dict[tuple[int, int], float],
) -> Iterator[dict[str, Any]]:
    for each in ranks:
        for call in each.calls:
            yield from _of_call(each.rank, call, each.clock + first)
    yield from _of_messages(ranks, first, ids, free)


def _of_call(rank: int, call: CallTimes, zero: float) -> Iterator[dict[str, Any]]:
    common = {"step": call.step, "direction": call.direction}

    def block(
        name: str,
        category: str,
        begin: float,
        end: float,
        args: dict[str, Any],
    ) -> dict[str, Any]:
        return _slice(rank, ATTENTION, name, category, begin - zero, end - zero, **args)

    if call.direction != "exchange":
        place = {"layer": call.layer, "microbatch": call.microbatch}
        name = f"{call.direction}: layer {call.layer}, microbatch {call.microbatch}"
        yield block(name, "call", call.begin, call.end, common | place)
    for hop in call.hops:
        args = {"hop": hop.hop, "pairs": hop.pairs, **common}
        yield block(f"hop {hop.hop}", "hop", hop.begin, hop.end, args)
        args = {"hop": hop.hop, **common}
        ends = [*(begin for begin, _ in hop.kernels[1:]), hop.end]
        for number, ((begin, end), until) in enumerate(zip(hop.kernels, ends, strict=False)):
            yield block(f"kernel call {number}", "kernel call", begin, end, args)
            yield block("merge", "merge", end, until, args)
    for wait in call.waits:
        if wait.end > wait.begin:
            name = f"wait for {wait.kind}, hop {wait.hop}"
            args = {"hop": wait.hop, "kind": wait.kind, **common}
            yield block(name, "wait", wait.begin, wait.end, args) | {"cname": _RED}


def _of_messages(
    ranks: Sequence[RankTimes],
    first: float,
    ids: Iterator[int],
    free: dict[tuple[int, int], float],
) -> Iterator[dict[str, Any]]:
    """Messages at both ends, and the arrow between. Those of a link follow one another: `free` is
    when its last one ended.
    """
    links: defaultdict[tuple[int, int], list[TimedMessage]] = defaultdict(list)
    for message in messages(ranks):
        links[message.sender, message.receiver].append(message)
    step = next((call.step for each in ranks for call in each.calls), 0)
    for (sender, receiver), of_link in links.items():
        for message in of_link:
            begin = max(message.sent - first, free[sender, receiver])
            end = max(message.end - first, message.start - first, begin)
            start = max(message.start - first, begin)
            free[sender, receiver] = end
            name = f"{message.kind}, hop {message.hop}"
            link = next(ids)
            args = {
                "message": link,
                "hop": message.hop,
                "bytes": message.size,
                "waited_us": round(message.waited * 1e6, 1),
                "kind": message.kind,
                "step": step,
                "direction": message.direction,
            }
            to, from_ = TO + receiver, FROM + sender
            yield _slice(sender, to, name, "sent message", begin, end, peer=receiver, **args)
            yield _slice(receiver, from_, name, "received message", start, end, peer=sender, **args)
            yield _arrow("s", sender, to, begin, link)
            # An arrow ends in the slice that is open at its time, and a slice is no longer open at
            # its end.
            yield _arrow("f", receiver, from_, start, link) | {"bp": "e"}


def _arrow(end: str, rank: int, thread: int, at: float, link: int) -> dict[str, Any]:
    """An end of an arrow: `s` where it starts, `f` where it leads to."""
    event = {"ph": end, "pid": rank, "tid": thread, "ts": round(at * 1e6, 3)}
    return {**event, "name": "message", "cat": "arrow", "id": link}


def read(path: Path) -> dict[str, Any]:
    """A trace that `write` has written. Raises `ConfigError` for another file."""
    try:
        trace = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path}: it is not a trace, nor other JSON") from None
    if not isinstance(trace, dict) or trace.get("otherData", {}).get("format") != FORMAT:
        raise ConfigError(f"{path}: it is not a trace of --cp-ring-trace")
    return trace
