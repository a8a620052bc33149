"""Runs the case tables of other libraries through `ring_attention`; exit code 1 if a case is wrong,
or rejected without a line of its own in the tables.
"""

import argparse
import os
import sys
import time

from tests.peers import gym, tables
from tests.peers.attend import run
from tests.rank_pool import Ranks

PEERS = {
    "TransformerEngine": tables.transformer_engine,
    "torch": tables.torch_context_parallel,
    "MagiAttention": tables.magi_attention,
    "ring-flash-attention": tables.ring_flash_attention,
    "ring-attention-pytorch": tables.ring_attention_pytorch,
    "long-context-attention": tables.long_context_attention,
    "Ulysses and FPDT": tables.ulysses_and_fpdt,
    "attention-gym": gym.attention_gym,
}


def table(name, every, processes=None):
    """A line about each n-th case of a table, and lines about those that failed. Without processes,
    those that need some are left out.
    """
    cases = list(PEERS[name]())[::every]
    cases = [case for case in cases if processes is not None or case.way == "threads"]
    worst, rejected, failures, start = 0.0, 0, [], time.monotonic()
    for case in cases:
        off, line = run(case, processes)
        if case.rejected or line:
            rejected += 1
            if not (case.rejected and case.rejected in line):
                failures.append(f"{name}: {case.name}: rejected: {line}")
        elif not off < 1:
            failures.append(f"{name}: {case.name}: off by {off:.3g} times the limit")
        else:
            worst = max(worst, off)
    passed, seconds = len(cases) - rejected - len(failures), time.monotonic() - start
    return (
        f"{name}: {len(cases)} cases, {passed} pass, {rejected} rejected, largest error "
        f"{worst:.2f} of the limit, {seconds:.0f} s",
        failures,
    )


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--every", type=int, default=1, help="each n-th case")
    given = parser.parse_args()
    failures = []
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    processes = Ranks(2)
    try:
        for name in given.only:
            line, failed = table(name, given.every, processes)
            print(line, flush=True)
            print(*failed, sep="\n", end="\n" * bool(failed), file=sys.stderr, flush=True)
            failures += failed
    finally:
        processes.close()
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
