"""For people: the commands of `cp-ring`, measurements, jobs of this machine."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command `cp-ring`. If a package that the command needs is missing, end with one line;
    `doctor` says what is missing.
    """
    try:
        from cp_ring.tools.cli import main as run

        run()
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing == "cp_ring":
            raise
        if sys.argv[1:2] == ["doctor"]:
            from cp_ring.tools import doctor

            sys.exit(doctor.main())
        sys.exit(
            f"cp_ring: error: cp-ring needs the package {missing}: pip install "
            "'CHECKOUT[megatron,tools,corpus,draw]'; cp-ring doctor names others"
        )
