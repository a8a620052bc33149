"""`python -m cp_ring.tools.cli`: the `cp-ring` command of this Python."""

from cp_ring.tools.cli import main

if __name__ == "__main__":
    main()
