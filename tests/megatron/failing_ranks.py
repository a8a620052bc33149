"""Starts jobs of two ranks that fail, one after another, and tells how each ends:
`python -m tests.megatron.failing_ranks CASES.json`.

A case is {"name", "argv", "environment"}: argv is a module with a function `main` and its flags. A
line of JSON for each case: exit codes of the ranks, seconds from the end of the first to that of
the last process that any of them has started, and whether that had to be killed.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from tests.megatron import imported  # noqa: F401  # once for all ranks
from tests.rank_pool import free_port

RANKS = 2
LIMIT_S = float(os.environ.get("LIMIT_S", "240"))
_SUBREAPER = 36


def rank(number, port, case):
    """What a rank does; its end is that of a Python process."""
    os.environ |= case["environment"] | {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    output = os.open(f"{case['name']}.{number}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    module, *flags = case["argv"]
    sys.argv = [module, *flags]
    importlib.import_module(module).main()


def launch(case):
    """As torchrun: holds the store, and ends the others when one has failed."""
    from torch.distributed import TCPStore

    # orphans become children of this process
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    port = free_port()
    ranks = []
    for number in range(RANKS):
        pid = os.fork()
        if not pid:
            rank(number, port, case)
            sys.exit()  # by the way of every Python process
        ranks.append(pid)
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    codes = {}
    first = hung = 0.0
    begun = time.monotonic()
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid in ranks:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] and not first:
                first = time.monotonic()
                for other in set(ranks) - set(codes):
                    os.kill(other, signal.SIGTERM)
        if not pid:
            time.sleep(0.05)
            if not hung and time.monotonic() - (first or begun) > LIMIT_S:
                hung = time.monotonic()
                for child in children():
                    os.kill(child, signal.SIGKILL)
    del store
    return {
        "name": case["name"], "codes": [codes[pid] for pid in ranks], "hung": bool(hung),
        "seconds": round(time.monotonic() - first, 1) if first else None,
    }  # fmt: skip


def children():
    import psutil

    return [child.pid for child in psutil.Process().children(recursive=True)]


def main():
    for case in json.loads(Path(sys.argv[1]).read_text()):
        pid = os.fork()
        if not pid:
            ended = launch(case)
            with open("ended.jsonl", "a") as file:
                print(json.dumps(ended), file=file)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
