"""Sampled steps: what is recorded, what it means, and that slow ranks and slow links are named,
each as what it is.
"""

import contextlib
import random
import re

import pytest
import torch

from cp_ring import LatentKeys, ring_attention
from cp_ring.errors import ConfigError
from cp_ring.observe import clocks, timing, trace
from cp_ring.observe.alarms import Alarms
from cp_ring.observe.findings import INSIDE, combined, group_findings
from cp_ring.observe.timed_messages import RankTimes, messages
from cp_ring.observe.watchdog import Place
from cp_ring.options import Options
from cp_ring.testing.local_ring import LocalRing
from tests.observe.virtual_time import LINK_S, PAIR_S, VirtualRing


def alarms(ring, samples=3, **settings):
    named = Alarms()
    return [
        line
        for step in range(samples)
        for line in named.lines(group_findings(step, ring.sample(step, **settings)))
    ]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_slow_rank_is_named(rank, monkeypatch):
    noise = random.Random(rank)
    ring = VirtualRing(
        4,
        lambda r: noise.uniform(0.97, 1.03) * (1.15 if r == rank else 1),
        lambda *_: 1.0,
        monkeypatch,
    )
    (line,) = alarms(ring)
    assert re.match(rf"slow rank: rank {rank} on host n{rank // 2} computes 1\d% longer", line)


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (3, 2)])
def test_a_slow_link_is_named_as_a_link(sender, receiver, monkeypatch):
    noise = random.Random(sender)
    ring = VirtualRing(
        4, lambda _: noise.uniform(0.97, 1.03), lambda s, r: 8.0 if (s, r) == (sender, receiver) else noise.uniform(0.9, 1.1),
        monkeypatch,
    )  # fmt: skip
    (line,) = alarms(ring, schedule="ring")
    assert re.match(
        rf"slow link: messages from rank {sender} on n\d to rank {receiver} on n\d take [3-9]\.\d "
        rf"times",
        line,
    )


def test_nobody_is_named_where_nothing_is_slow(monkeypatch):
    noise = random.Random(1)
    ring = VirtualRing(
        4, lambda _: noise.uniform(0.95, 1.05), lambda *_: noise.uniform(0.7, 1.4), monkeypatch
    )
    for schedule in ("ring", "auto", "gather") * 2:
        assert alarms(ring, schedule=schedule) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_plants_at_random_places_are_named(seed, monkeypatch):
    noise, size = random.Random(seed), random.Random(seed).choice((3, 4, 6))
    rank, other = noise.sample(range(size), 2)
    schedule = noise.choice(("ring", "auto"))
    slow_rank, slow_link = (
        (noise.uniform(1.15, 2.0), 1.0) if seed % 2 else (1.0, noise.uniform(6.0, 20.0))
    )

    def link(sender, receiver):
        return noise.uniform(0.8, 1.2) * (slow_link if (sender, receiver) == (other, rank) else 1.0)

    ring = VirtualRing(
        size,
        lambda r: noise.uniform(0.97, 1.03) * (slow_rank if r == rank else 1.0),
        link,
        monkeypatch,
    )
    (line,) = alarms(ring, schedule=schedule)
    assert line.startswith(
        f"slow rank: rank {rank} " if seed % 2 else f"slow link: messages from rank {other} on"
    )
    assert seed % 2 or f"to rank {rank} on" in line


def test_a_rank_that_seems_slow_once_does_not_hide_a_slow_link(monkeypatch):
    """One that is slow in every sample does: what is slow is the rank, and so is what it sends."""
    factors = {}
    ring = VirtualRing(
        4, lambda r: factors.get(r, 1.0), lambda s, r: 8.0 if (s, r) == (0, 1) else 1.0, monkeypatch
    )
    for slow, words in (([1, 2, None, None], "slow link"), ([1, 1, 1, 1, 1], "slow rank: rank 1 ")):
        named, lines = Alarms(), []
        for step, rank in enumerate(slow):
            factors.clear()
            factors[rank] = 1.5
            lines += named.lines(group_findings(step, ring.sample(step, calls=1, schedule="ring")))
        assert len(lines) == 1 and lines[0].startswith(words), lines


def test_it_takes_consecutive_samples(monkeypatch):
    factors = {2: 1.3}
    ring = VirtualRing(4, lambda r: factors.get(r, 1.0), lambda *_: 1.0, monkeypatch)
    named, lines = Alarms(), []
    for step, slow in enumerate([1.3, 1.3, 1.0, 1.3, 1.3, 1.3, 1.3]):
        factors[2] = slow
        lines.append(named.lines(group_findings(step, ring.sample(step, calls=1))))
    assert [len(each) for each in lines] == [0, 0, 0, 0, 0, 1, 0], (
        "once, after three consecutive samples"
    )


def test_times_are_those_of_the_model(monkeypatch):
    ring = VirtualRing(4, lambda _: 1.0, lambda *_: 1.0, monkeypatch)
    ranks = ring.sample(1, calls=2, schedule="ring")
    found = group_findings(1, ranks)
    assert found.calls == 4 and found.ranks == 4
    assert found.balance_planned == pytest.approx(1.0) and found.balance_timed == pytest.approx(1.0)
    # A hop of forward computes half a square of the shard. The keys of hop 1 travel while hop 0 is
    # computed.
    compute, wait = found.hops["forward", 1]
    assert compute == pytest.approx(2 * 512 * PAIR_S) and wait == pytest.approx(
        2 * (LINK_S - 512 * PAIR_S)
    )
    assert found.exposed == pytest.approx(sum(wait for _, wait in found.hops.values()))
    assert found.attention == pytest.approx(
        sum(compute + wait for compute, wait in found.hops.values())
    )
    first = [
        message
        for message in messages(ranks)
        if (message.kind, message.hop, message.direction) == ("keys", 1, "forward")
    ]
    assert len(first) == 8 and all(
        message.end - message.start == pytest.approx(LINK_S) for message in first
    )
    record = found.record()
    assert record["exposed_share"] == pytest.approx(found.exposed / found.attention, abs=1e-4)
    assert set(record["wire_gb_s"]) == {INSIDE, "between nodes"} and record["wire_at_least"] == []
    assert "timing of step 1: attention" in found.line() and "GB/s inside nodes" in found.line()
    assert "cp" not in " ".join(found.scalars())


def test_hidden_messages_give_a_lower_limit_of_the_wire(monkeypatch):
    ring = VirtualRing(2, lambda _: 1.0, lambda *_: 0.01, monkeypatch)
    found = group_findings(1, ring.sample(1, calls=1))
    assert found.exposed == pytest.approx(0.0, abs=1e-4) and found.wire[INSIDE][1]
    assert "at least" in found.line()


def test_an_uneven_plan_does_not_make_a_rank_slow(monkeypatch):
    ring = VirtualRing(4, lambda _: 1.0, lambda *_: 1.0, monkeypatch)
    ranks = ring.sample(1, layout="contiguous")  # rank 3 computes seven times as much as rank 0
    found = group_findings(1, ranks)
    assert found.balance_planned > 1.5 and found.balance_timed > 1.5
    assert found.slowest_rank.slower < 1.1


def test_groups_are_combined(monkeypatch):
    ring = VirtualRing(2, lambda r: 1.0 + 0.3 * r, lambda *_: 1.0, monkeypatch)
    one, other = (group_findings(4, ring.sample(4, calls=calls)) for calls in (1, 3))
    whole = combined([one, other])
    assert (
        whole.ranks == 4
        and whole.calls == 6
        and whole.attention == pytest.approx((one.attention + other.attention) / 2)
    )
    assert whole.slowest_rank.rank == 1 and whole.exposed_max == max(
        one.exposed_max, other.exposed_max
    )


@pytest.mark.parametrize(
    ("heads", "wire"), [(1, "plain"), (2, "plain"), (4, "plain"), (1, "latent")]
)
def test_every_message_has_both_ends(heads, wire):
    """In real time, also with the exchange of heads and latents, and no duration is negative."""

    def case(group):
        q, k, v = (torch.randn(1, 32, 4, 8, requires_grad=True) for _ in range(3))
        if wire == "latent":
            weight = torch.randn(4 * (4 + 8), 6, requires_grad=True)
            k, v = LatentKeys(q[..., 0, :6], q[..., 0, 4:], weight, 4, 4), None
        for _ in range(2):
            out = ring_attention(q, k, v, group, causal=True, heads=heads, wire=wire)
            out.sum().backward()

    with timing.record(kernels=True) as recording:
        LocalRing(4).run(case)
    calls = recording.resolve()
    ranks = [timing_of(rank, calls) for rank in range(4)]
    posted = sum(len(post.sends) for call in calls for post in call.posts)
    assert (
        posted
        == sum(len(post.receives) for call in calls for post in call.posts)
        == len(list(messages(ranks)))
        > 0
    )
    for call in calls:
        parts = [*call.hops, *call.waits]
        assert all(call.begin <= part.begin <= part.end <= call.end for part in parts)
        assert all(
            hop.begin <= begin <= end <= hop.end for hop in call.hops for begin, end in hop.kernels
        )
        assert all(hop.kernels for hop in call.hops)
    assert group_findings(0, ranks).attention > 0


def timing_of(rank, calls):
    return RankTimes(rank, "here", [call for call in calls if call.rank == rank])


def test_the_sampler_records_the_steps_that_it_wants(monkeypatch):
    sampler = timing.Sampler(3, range(4, 6))
    monkeypatch.setattr(timing.SAMPLER, "value", sampler)
    taken = []
    for step in range(1, 8):
        for place in (Place(step), Place(step)):
            timing.at_step(step)
            with timing.timed(0, place, "forward", torch.device("cpu")):
                pass
        recording = sampler.close(step)
        timing.at_step(step)  # evaluation after the step
        assert timing.ACTIVE.value is None
        if recording is not None:
            taken.append((recording.step, len(recording.calls), recording.kernels))
    assert taken == [(3, 2, False), (4, 2, True), (5, 2, True), (6, 2, False)]


def test_only_the_first_calls_of_a_step_are_recorded(monkeypatch):
    monkeypatch.setattr(timing, "MAX_CALLS", 3)
    with timing.record() as recording:
        for _ in range(5):
            with timing.timed(0, Place(), "forward", torch.device("cpu")):
                pass
    assert len(recording.resolve()) == 3


def offset_of_another_host(group):
    """Each rank of the pool claims to be a host of its own, with a clock 5 seconds ahead of that of
    the rank before it.
    """
    import torch.distributed as dist

    rank, boot, clock = dist.get_rank(group), clocks.boot, timing.clock
    try:
        same = clocks.offset(group)
        clocks.boot, timing.clock = lambda: str(rank), lambda: clock() + 5.0 * rank
        return same, clocks.offset(group)
    finally:
        clocks.boot, timing.clock = boot, clock


def test_clocks_of_other_hosts_are_compared(pool):
    for rank, (same, other) in enumerate(pool.run(offset_of_another_host, 3)):
        assert same == (0.0, 0.0), "ranks of one system send nothing"
        assert abs(other.seconds - 5.0 * rank) <= other.error and (other.error > 0) == (rank > 0)


def timed_steps(group, folder):
    """Three steps of one call each; the second and third are sampled."""
    from cp_ring.megatron.step_timing import StepTiming
    from cp_ring.observe.watchdog import WATCH

    said = []
    timing.SAMPLER.value = sampler = timing.Sampler(0, range(2, 4))
    steps = StepTiming(sampler, lambda: group, said.append)
    found = []
    try:
        for step in range(1, 4):
            timing.at_step(step)
            WATCH.place = Place(step, 1, 0)
            q, k, v = (torch.randn(1, 32, 4, 8, requires_grad=True) for _ in range(3))
            ring_attention(q, k, v, group, causal=True).sum().backward()
            with contextlib.chdir(folder):  # where the trace is written
                found.append([each.step for each in steps.end_of_step(step, last=step == 3)])
    finally:
        timing.SAMPLER.value, WATCH.place = None, Place()
    return found, said


def test_the_last_rank_gets_the_times_a_step_later(pool, tmp_path):
    *others, (found, said) = pool.run(timed_steps, 4, str(tmp_path))
    assert found == [[], [], [2, 3]]
    assert [line.partition(":")[2].split(":")[0] for line in said] == [
        " timing of step 2",
        " the trace is in " + str(tmp_path / "trace-2.json"),
        " timing of step 3",
    ]
    assert all(found == [[], [], []] and not said for found, said in others)
    check(trace.read(tmp_path / "trace-2.json"), steps=2, ranks=4, calls=2)


def check(made, steps, ranks, calls):
    """Every message has both ends, no duration is negative, and the parts of a call lie within it."""
    events = made["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    of = {
        kind: [event for event in slices if event["cat"] == kind]
        for kind in {event["cat"] for event in slices}
    }
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    sent, received = (
        {event["args"]["message"]: event for event in of[f"{end} message"]}
        for end in ("sent", "received")
    )
    assert sent.keys() == received.keys() and len(sent) == len(of["sent message"]) > 0
    for link, start in sent.items():
        end = received[link]
        assert start["args"]["bytes"] == end["args"]["bytes"] and (
            start["pid"],
            start["args"]["peer"],
        ) == (
            end["args"]["peer"],
            end["pid"],
        )
        assert start["ts"] <= end["ts"] + end["dur"]
    arrows = {ph: sorted(event["id"] for event in events if event["ph"] == ph) for ph in "sf"}
    assert arrows["s"] == arrows["f"] == sorted(sent)
    assert len(of["call"]) == steps * ranks * calls
    for inner in of["hop"] + of["wait"]:
        assert any(within(inner, call) for call in of["call"])
    for inner in of["kernel call"] + of["merge"]:
        assert any(within(inner, hop) for hop in of["hop"])
    assert made["otherData"]["steps"] == sorted({call["args"]["step"] for call in of["call"]})
    return of


def within(inner, outer):
    return (
        inner["pid"] == outer["pid"]
        and outer["ts"] <= inner["ts"] + 2e-3
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 2e-3
    )


def test_a_trace_has_the_hops_of_the_plan(monkeypatch, tmp_path):
    ring = VirtualRing(4, lambda _: 1.0, lambda *_: 1.0, monkeypatch)
    path = tmp_path / "deep" / "trace.json"
    trace.write(path, {0: ring.sample(0, calls=2, schedule="ring", kernels=True)}, 1e-6)
    of = check(trace.read(path), steps=1, ranks=4, calls=4)
    forward = [
        event["name"]
        for event in of["hop"]
        if event["pid"] == 2 and event["args"]["direction"] == "forward"
    ]
    assert forward == [f"hop {hop}" for hop in range(4)] * 2
    assert all(event["cname"] == "terrible" for event in of["wait"])
    assert trace.read(path)["otherData"]["clock_error_us"] == 1.0


def test_another_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        trace.read(tmp_path / "none.json")
    for text in ("x", "[]", "{}"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ConfigError, match="it is not a trace"):
            trace.read(tmp_path / "other.json")


@pytest.mark.parametrize(("text", "steps"), [("", []), ("7", [7]), ("7:3", [7, 8, 9])])
def test_steps_to_trace(text, steps):
    assert list(Options.make(trace=text).traced) == steps


@pytest.mark.parametrize("text", ["0", "x", "3:0", "3:", ":2", "-1", "1:2:3"])
def test_steps_that_are_none(text):
    with pytest.raises(ConfigError, match=r"--cp-ring-trace .*it is not STEP or STEP:COUNT"):
        Options.make(trace=text)
