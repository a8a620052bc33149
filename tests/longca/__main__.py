"""python -m tests.longca [--cells TEXT]: the table of all cells, or of those
in whose name a part of TEXT is.
"""

import argparse

from tests.longca.masks import cells
from tests.longca.table import printed, row

parser = argparse.ArgumentParser(prog="python -m tests.longca", description=__doc__)
parser.add_argument("--cells", default="", help="beginnings of names, as in 'causal 8,full 16'")
parser.add_argument("--each", action="store_true", help="a line for each cell too")


def main():
    args = parser.parse_args()
    chosen = [c for c in cells() if str(c).startswith(tuple(args.cells.split(",")))]
    rows = []
    for cell in chosen:
        rows.append(row(cell))
        if args.each:
            print(rows[-1], flush=True)
    print("\n".join(printed(rows)))


main()
