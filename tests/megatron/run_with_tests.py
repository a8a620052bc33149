"""`cp_ring.run` where a script's folder has a package `tests` of its own: specifications are ours."""

import tests.parity  # noqa: F401
from cp_ring.run import main

main()
