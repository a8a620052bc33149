"""`python -m cp_ring.cli`: the `cp-ring` command of this Python."""

from cp_ring.cli import main

if __name__ == "__main__":
    main()
