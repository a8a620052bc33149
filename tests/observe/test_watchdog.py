"""A rank that stands still is named, with the hop and the peer that wait for it, and all ranks end."""

import json
import multiprocessing as mp
import os
import time
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.comm import transport
from cp_ring.observe import watchdog
from tests.rank_pool import LIMIT_S, free_port

# seconds: a busy machine must not keep a healthy rank waiting for as long
TIMEOUT, RANKS, SLEEPER = 20.0, 4, 2


def hanging_rank(rank, port, folder):
    """Trains two steps of three layers, of which the second is one of a group of ranks 1 to 3; in
    step 2, before rank 2 sends the keys of hop 2 of layer 2, it sleeps.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    post = transport.GroupTransport.post

    def sleeping_post(self, batch):
        place = watchdog.WATCH.place
        if rank == SLEEPER and (place.step, place.layer, batch.hop) == (2, 2, 2):
            time.sleep(600)
        return post(self, batch)

    transport.GroupTransport.post = sleeping_post
    dist.barrier()  # ranks need different times to start
    watchdog.start(TIMEOUT)
    some = dist.new_group([1, 2, 3])
    groups = {layer: dist.group.WORLD if layer != 2 else some for layer in (1, 2, 3)}
    plans = {
        layer: Plan.build(Mask.causal(n), Layout.zigzag(n, n // 16), schedule="ring")
        for layer, n in {1: 64, 2: 48, 3: 64}.items()
    }
    for step in (1, 2):
        x = torch.randn(1, 16, 2, 8, requires_grad=True)
        for layer in (1, 2, 3) if rank else (1, 3):
            watchdog.enter(layer, step)
            x = ring_attention(x, x, x, groups[layer], plan=plans[layer])
        x.sum().backward()
        dist.barrier()


def run(folder):
    """Exit codes, and each rank's lines, of a run that hangs."""
    context = mp.get_context("forkserver")
    # as the training jobs, which share this server
    context.set_forkserver_preload(["tests.megatron.imported"])
    port = free_port()
    ranks = [
        context.Process(target=hanging_rank, args=(rank, port, folder)) for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    texts = [(folder / f"{rank}.txt").read_text() for rank in range(RANKS)]
    return codes, [
        [line for line in text.splitlines() if line.startswith("cp_ring: ")] for text in texts
    ]


def all_ended(codes):
    """Every rank ended by itself. Rank 0 names the first stuck rank and leaves; that breaks the
    connections of the others, whose main thread may end with the error of gloo (exit code 1) before
    their watchdog ends them."""
    return codes[0] == watchdog.EXIT_CODE and set(codes) <= {watchdog.EXIT_CODE, 1}


def test_a_rank_that_sleeps_in_a_hop_is_named(tmp_path):
    codes, lines = run(tmp_path)
    assert all_ended(codes), (codes, lines)
    where = "step 2, microbatch 0, layer 2, forward, hop"
    assert (
        f"rank {SLEEPER} does not wait for anyone: it is in sleeping_post (test_watchdog.py:"
        in lines[SLEEPER][0]
    )
    assert any(
        f"{where} 2: keys from rank {SLEEPER} tokens " in line
        for lines_of in lines
        for line in lines_of
    )
    (verdict,) = [line for lines_of in lines for line in lines_of if "first stuck" in line]
    assert (
        verdict in lines[0]
        and f"first stuck: rank {SLEEPER}, which does not wait for anyone" in verdict
    )
    assert "; waiting for it: rank " in verdict and verdict.endswith("; ending the job")


def test_a_rank_that_does_not_answer_is_named():
    waits = {
        "waits": "hop",
        "at": "",
        "seconds": 3.0,
        "from": [[1, [[0, 8]]]],
        "to": [],
        "ranks": [4, 6],
        "kind": "keys",
    }
    place = {"step": 5, "microbatch": 1, "layer": 2, "direction": "backward", "hop": 3}
    told = {rank: waits | place for rank in range(8) if rank != 6}
    assert watchdog.verdict(told, 8) == "first stuck: rank 6, which does not answer"
    told[6] = waits | place | {"hop": 2}
    assert watchdog.verdict(told, 8).startswith(
        "first stuck: rank 6, which waits for 3 s: step 5, microbatch 1, layer 2, back"
    )
    assert "hop 2: keys from rank 6 tokens 0:8" in watchdog.sentence(told[6])
    assert json.loads(json.dumps(told[6])) == told[6]


class Store(dict):
    def set(self, name, value):
        self[name] = value

    def check(self, names):
        return all(name in self for name in names)


def test_what_the_device_waits_for_is_seen_though_the_host_does_not_wait(monkeypatch, capsys):
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.0)
    ended, device, asked, modes = [], torch.device("cuda", 5), [], []

    @contextmanager
    def on(it):
        asked.append(it)
        yield
        asked.append(None)

    def is_completed():
        assert asked[-1] == device, (
            "a thread begins on the first device, which is that of another rank"
        )
        assert modes[-1] == 2, "the question would break a graph that another thread captures"
        return False

    def exchange(mode):
        modes.append(mode._obj.value)

    cudart = SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(watchdog.ctypes, "CDLL", lambda _: cudart)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    work = SimpleNamespace(is_completed=is_completed)
    watch = watchdog.Watch(watchdog.Place(7, 4, 2))
    monkeypatch.setattr(watchdog, "WATCH", watch)
    monkeypatch.setattr(watchdog, "_dogs", {"group": None})
    receive = (
        SimpleNamespace(peer=3, ranges=((0, 16),)),
        [SimpleNamespace(is_cuda=True, device=device)],
    )
    watch.begin(SimpleNamespace(receives=[receive], sends=[], kind="keys", hop=1, ranks=()), [work])
    watch.end()
    dog = watchdog.Watchdog(0.01, 0, 1, Store(), ended.append)
    time.sleep(0.05)
    assert dog.waited() > 0.04
    dog.report()
    printed = capsys.readouterr().err
    assert (
        "step 7, microbatch 2, layer 4, forward, hop 1: keys from rank 3 tokens 0:16" in printed
        and ended == [3]
    )
    work.is_completed = lambda: True
    assert dog.waited() == 0.0


def test_a_collective_that_takes_long_is_reported_and_not_ended(monkeypatch, capsys):
    """Rank 0 tokenizes or evaluates for longer than a hop may take, and the others wait for it."""
    monkeypatch.setattr(watchdog, "WATCH", watchdog.Watch())
    # whatever runs is a collective that does not end
    monkeypatch.setattr(watchdog, "_collective", lambda frame: frame)
    clock, ended = [0.0], []
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    store = Store()
    dog = watchdog.Watchdog(600.0, 0, 2, store, ended.append)
    frame = SimpleNamespace(f_lasti=1, f_code=all_ended.__code__, f_lineno=7, f_back=None)
    monkeypatch.setattr(watchdog.sys, "_current_frames", lambda: {dog._main: frame})
    ticks = []

    def sleep(seconds):
        clock[0] += seconds
        ticks.append(seconds)
        return len(ticks) < 1000

    monkeypatch.setattr(watchdog.threads, "sleep", sleep)
    dog.run(lambda: True)
    assert clock[0] > 4000 and not ended
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "cp_ring: watchdog: rank 0 waits in a collective, all_ended (test_watchdog.py:7); "
        "the job goes on"
    )
    # a rank that the others wait for is asked, and says it once, too
    monkeypatch.setattr(watchdog, "_collective", lambda frame: None)
    for rank in (1, 2):
        ticks.clear()
        other = watchdog.Watchdog(600.0, rank, 3, store, ended.append)
        monkeypatch.setattr(watchdog.sys, "_current_frames", lambda: {other._main: frame})  # noqa: B023
        other.run(lambda: True)
        assert capsys.readouterr().err == (
            f"cp_ring: watchdog: rank {rank} does not wait for anyone: it is in all_ended "
            "(test_watchdog.py:7); the job goes on\n"
        )
    assert not ended


def test_a_rank_ends_with_one_that_has_failed(monkeypatch, capsys):
    ended, store = [], Store()
    store.set("cp_ring/watchdog/failed", b"rank 3: ValueError: a bug")
    monkeypatch.setattr(watchdog.threads, "sleep", lambda seconds: True)
    watchdog.Watchdog(600.0, 3, 4, store, ended.append).run(lambda: True)
    assert not ended  # it ends by its own error
    watchdog.Watchdog(600.0, 1, 4, store, ended.append).run(lambda: True)
    assert ended == [watchdog.EXIT_CODE]
    assert "another has failed: rank 3: ValueError: a bug" in capsys.readouterr().err
