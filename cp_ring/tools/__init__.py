"""For people: the commands of `cp-ring`, measurements, jobs of this machine and of Slurm."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script `cp-ring`: without a package that a command needs it ends with one line,
    and `doctor` says what is missing.
    """
    try:
        from cp_ring.tools.cli import main as run

        run()
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing == "cp_ring":
            raise
        if sys.argv[1:2] == ["doctor"]:
            from cp_ring.tools.job import doctor

            sys.exit(doctor.main())
        sys.exit(
            f"cp_ring: error: cp-ring needs the package {missing}: pip install "
            "'cp-ring[megatron,tools]'; cp-ring doctor says what else is missing"
        )
