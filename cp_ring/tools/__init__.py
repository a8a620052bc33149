"""For people: the commands of `cp-ring`, measurements, jobs of this machine and of Slurm."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script `cp-ring`: without the packages of the extra it ends with one line."""
    try:
        from cp_ring.tools.cli import main as run
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing == "cp_ring":
            raise
        sys.exit(
            f"cp_ring: error: cp-ring needs the package {missing}: pip install 'cp-ring[tools]'"
        )
    run()
