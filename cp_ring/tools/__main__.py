"""`python -m cp_ring.tools`: the `cp-ring` command of this Python."""

from cp_ring.tools import main

if __name__ == "__main__":
    main()
