"""What is concluded from logs of the fake GPU, on logs written by hand: stream 1 is NCCL's."""

from __future__ import annotations

import pytest

from tests.fakegpu.log import Log
from tests.fakegpu.replay import hangs, in_flight_together, mismatches, read_by

ARRIVES = ["nccl 1 recv a 0 1 64 1000", "group", "record 1 7"]
READ = "access 0 add r:1000:1064 w:2000:2064"
SENT = ["access 0 add w:1000:1064", "record 0 5", "wait 1 5", "nccl 1 send a 0 1 64 1000", "group"]
AGAIN = "access 0 mul w:1032:1064"
FREED = [*SENT, "record 1 7", "query event 7"]


def log_of(tmp_path, lines: list[str], number: int = 0) -> Log:
    path = tmp_path / f"{number}.log"
    path.write_text("".join(f"1 {line}\n" for line in ["mark case", *lines]))
    return Log.read(path)


@pytest.mark.parametrize(
    "lines, racing",
    {
        "waits": ([*ARRIVES, "wait 0 7", READ], False),
        "does not": ([*ARRIVES, READ], True),
        "waits for what was before": (["record 1 7", *ARRIVES[:2], "wait 0 7", READ], True),
        "waits by another stream": (
            [*ARRIVES, "wait 2 7", "record 2 8", "wait 0 8", READ], False,
        ),
        "the host waits": ([*ARRIVES, "sync event 7", READ], False),
        "the host asks only": ([*ARRIVES, "query event 7", READ], True),
        "written while it is sent": ([*SENT, AGAIN], True),
        "written after it is sent": ([*SENT, "record 1 7", "wait 0 7", AGAIN], False),
        "read while it is sent": ([*SENT, READ], False),
        "freed, done and new": ([*FREED, "access 0 empty n:1000:1064", AGAIN], False),
        "freed, not done and new": ([*SENT, "access 0 empty n:1000:1064", AGAIN], True),
        "done but not freed": ([*FREED, AGAIN], True),
        "other memory": ([*SENT, "access 0 mul w:1064:1100"], False),
    }.values(),
)  # fmt: skip
def test_races(tmp_path, lines, racing):
    assert bool(log_of(tmp_path, lines).races) == racing


FORKED = ["begin 2 0", "record 2 5", "wait 1 5", "launch 1 1,1,1 1 0 k", "record 1 6"]


@pytest.mark.parametrize(
    "lines, faults",
    [
        ([*FORKED, "wait 2 6", "end 2"], 0),
        ([*FORKED, "end 2"], 1),
        (["record 1 6", "begin 2 0", "wait 2 6", "end 2"], 1),
        (["begin 2 0", "sync stream 2", "end 2"], 1),
        (["begin 2 0", "malloc 64", "end 2"], 1),
        (["begin 2 0", "mode 2", "malloc 64", "mode 0", "end 2"], 0),
        (["begin 2 0", "end 2", "malloc 64", "sync device"], 0),
        (["begin 2 0", "copy 2 DH 64 1000 2000", "end 2"], 1),
        (["begin 2 0", "copy 2 DP 64 1000 2000", "end 2"], 0),
    ],
)
def test_captures(tmp_path, lines, faults):
    assert len(log_of(tmp_path, lines).capture_faults) == faults


def test_kernels_whose_memory_is_unknown(tmp_path):
    launch = "launch 0 1,1,1 1 0 kernel"
    assert not log_of(tmp_path, [launch, READ, "record 0 5"]).unknown()
    assert log_of(tmp_path, [launch, "record 0 5", READ]).unknown()


def ring_of(tmp_path, groups: list[list[list[tuple[str, int, int]]]]) -> list[Log]:
    """Logs of ranks from (kind, peer, bytes) of their groups."""
    logs = []
    for rank, mine in enumerate(groups):
        lines = [f"communicator a {len(groups)} {rank}"]
        for group in mine:
            lines += [f"nccl 1 {kind} a {rank} {peer} {size} 0" for kind, peer, size in group]
            lines.append("group")
        logs.append(log_of(tmp_path, lines, rank))
    return logs


def test_groups_that_wait_for_each_other_hang(tmp_path):
    to = [[("send", (rank + 1) % 3, 8)] for rank in range(3)]
    come = [[("recv", (rank - 1) % 3, 8)] for rank in range(3)]
    together = [[a + b] for a, b in zip(to, come, strict=True)]
    assert not hangs(ring_of(tmp_path, together))
    assert not hangs(ring_of(tmp_path, [[to[0], come[0]], [come[1], to[1]], [come[2], to[2]]]))
    assert "rank 2" in hangs(ring_of(tmp_path, [[a, b] for a, b in zip(to, come, strict=True)]))
    everyone = [("all", 0, 4)]
    assert not hangs(ring_of(tmp_path, [[everyone, *x] for x in together]))
    assert hangs(
        ring_of(tmp_path, [[everyone, *together[0]], *[[*x, everyone] for x in together[1:]]])
    )


@pytest.mark.parametrize("sent, received", [([8], [4]), ([8], []), ([0], [0]), ([8, 4], [4, 8])])
def test_messages_that_do_not_fit(tmp_path, sent, received):
    ends = ([("send", 1, x) for x in sent], [("recv", 0, x) for x in received])
    assert mismatches(ring_of(tmp_path, [[end] for end in ends]))
    assert not mismatches(ring_of(tmp_path, [[[("send", 1, 8)]], [[("recv", 0, 8)]]]))


def test_communicators_in_flight_together(tmp_path):
    first = ["nccl 1 send a 0 1 8 0", "group", "record 1 7"]
    second = ["nccl 2 send b 0 1 8 8", "group"]
    assert in_flight_together(log_of(tmp_path, [*first, *second]))
    assert not in_flight_together(log_of(tmp_path, [*first, "wait 2 7", *second]))


def test_what_an_operator_reads_of_what_was_sent(tmp_path):
    """Rank 0 sends its last 2 of 4 keys; rank 1 reads them behind 3 of its own."""
    sends = ["communicator a 2 0", "label keys 1000:1040:4", "nccl 1 send a 0 1 20 1020", "group"]
    reads = ["communicator a 2 1", "label keys 3000:3040:4", "nccl 1 recv a 1 0 20 3030", "group"]
    reads += ["access 0 other r:3000:3050", "access 0 attend r:3000:3050 r:3040:3050 w:9000:9010"]
    logs = [log_of(tmp_path, lines, rank) for rank, lines in enumerate((sends, reads))]
    own, sent = [("keys", 1, 0, 3)], [("keys", 0, 2, 4)]
    assert read_by(logs, "attend", "case") == [[], [[own + sent, [("keys", 0, 3, 4)]]]]
