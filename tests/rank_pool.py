"""A pool of ranks on this machine that runs many cases. Starting a rank takes seconds; a case takes
milliseconds.
"""

import datetime
import multiprocessing as mp
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import wait

LIMIT_S = 1800.0  # of whatever may hang; a slow or busy machine does not come near it


class RankError(AssertionError):
    """A case failed on a rank. The message is the traceback of that rank."""


def free_port():
    """A port of loopback on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def python(*words, **options):
    """A process of Python that has run these words, with what it wrote."""
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=LIMIT_S, **options
    )


def start(process):
    """Starts a process. Where the fork server has ended, prints how, and starts the server again,
    once.
    """
    try:
        process.start()
    except (EOFError, ConnectionError) as error:
        print(
            f"cp_ring: the fork server {_end_of_fork_server() or repr(error)}; it is started again",
            file=sys.stderr,
            flush=True,
        )
        process.start()


def _end_of_fork_server():
    """How the fork server ended, once it has; "" without one. multiprocessing finds it ended too,
    and makes another one.
    """
    pid = forkserver._forkserver._forkserver_pid
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) if pid else None
    if ended is None:
        return ""
    kind = "exit code" if ended.si_code == os.CLD_EXITED else "signal"
    return f"ended with {kind} {ended.si_status}"


class Ranks:
    """`size` processes of one thread each.

    They are forked from multiprocessing's fork server, which has imported what the caller has told
    it to.

    `run(case, cp, ...)` calls `case(group, ...)` on ranks 0 to cp - 1 and returns their results in
    rank order. `case` is a function of a module. `group` is the process group of those ranks, or
    None for cp 1.
    """

    def __init__(self, size):
        context = mp.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            store = f"file://{self._folder.name}/store"
            process = context.Process(
                target=_run_cases, args=(rank, size, store, theirs), daemon=True
            )
            start(process)
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self,
        case,
        cp,
        /,
        *args,
        timeout=LIMIT_S,
        **kwargs,
    ):
        for pipe in self._pipes[:cp]:
            pipe.send((case, cp, args, kwargs))
        results = [None] * cp
        left = set(range(cp))
        while left:
            ready = wait([self._pipes[rank] for rank in left], timeout)
            if not ready:
                self.close()
                raise RankError(f"ranks {sorted(left)} of {cp} did not answer in {timeout} s")
            for rank in [r for r in left if self._pipes[r] in ready]:
                good, results[rank] = self._pipes[rank].recv()
                left.remove(rank)
                if not good:
                    # The other ranks may wait for this rank forever.
                    self.close()
                    raise RankError(f"rank {rank} of {cp}:\n{results[rank]}")
        return results

    @property
    def closed(self):
        return not self._pipes

    def close(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


def _run_cases(rank, size, store, pipe):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)
    # each rank has as many groups, of which torch makes the names of groups that only they know
    alone = [dist.new_group([each]) for each in range(size)][rank]
    groups = {1: alone} | {cp: dist.new_group(list(range(cp))) for cp in range(2, size + 1)}
    while True:
        try:
            case, cp, args, kwargs = pipe.recv()
        except EOFError:
            return
        # Ranks of a case that others have no part in know calls of their groups that others do not.
        if agreement := sys.modules.get("cp_ring.comm.agreement"):
            agreement.begin_anew()
        made = dist.distributed_c10d._world.group_count
        try:
            result = case(groups.get(cp), *args, **kwargs)
            # torch names groups by this number, and new_group waits for ranks of the same name
            if cp < size and made != dist.distributed_c10d._world.group_count:
                raise RuntimeError("the case made groups that the other ranks of the pool do not")
            pipe.send((True, result))
        except BaseException:  # SystemExit too, so that the test sees it
            pipe.send((False, traceback.format_exc()))
