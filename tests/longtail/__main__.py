"""python -m tests.longtail: predicted attention time of a step over the ideal, mean and worst of
draws, in each way to split long-tailed documents over ranks in nodes of 8.
"""

import argparse

import numpy as np

from tests.longtail.shapes import SHAPES
from tests.longtail.table import cell, scheduler_of, ways

parser = argparse.ArgumentParser(prog="python -m tests.longtail", description=__doc__)
parser.add_argument("--ranks", default="64", help="as in 64,128,256")
parser.add_argument("--microbatches", default="1,4", help="of a step, in one ring")
parser.add_argument("--draws", type=int, default=20)
parser.add_argument("--shapes", default=",".join(SHAPES))
parser.add_argument("--dev", default="", help="a checkout of Megatron-LM's branch dev")


def main():
    args = parser.parse_args()
    schedule = scheduler_of(args.dev) if args.dev else None
    print("| documents | ranks | microbatches | way | mean | worst | late, mean | padding |")
    print("|---|--:|--:|---|--:|--:|--:|--:|")
    for name in args.shapes.split(","):
        for ranks in map(int, args.ranks.split(",")):
            for microbatches in map(int, args.microbatches.split(",")):
                for way, call in ways(schedule):
                    found = cell(call, SHAPES[name], ranks, microbatches, args.draws)
                    formula = [each.formula for each in found]
                    many = np.mean([each.microbatches for each in found])
                    late, padding = (
                        np.mean([getattr(each, of) for each in found]) for of in ("late", "padding")
                    )
                    print(
                        f"| {name} | {ranks} | {many:.1f} | {way} | {np.mean(formula):.2f} | "
                        f"{max(formula):.2f} | {late:.2f} | {padding:.1%} |",
                        flush=True,
                    )


main()
