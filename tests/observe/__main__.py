"""Runs the campaign of slow ranks and links:
`python -m tests.observe --plants N --undisturbed N [--json]`, as root.

Each plant is one of a random rank that takes 1.3 to 3 times as long, or of a random wire on which
the keys of a rank take so long that the receiver must wait. Processes, kernels and messages are
real. Exit code 1 unless every plant is named as what it is, with nothing beside it, and no
undisturbed run has an alarm.
"""

from __future__ import annotations

import argparse
import json
import random
import sys

from cp_ring.tools.bench import facts
from tests.network import ThrottledMesh
from tests.observe.plants import RANKS, Plant, Setting, try_plant
from tests.rank_pool import Ranks

REAL = Setting(tokens=256, heads=8, calls=3)
TIMED = Setting(tokens=64, calls=2, pair_s=1.5e-5)


def random_plant(chance: random.Random, setting: Setting, link: bool) -> Plant:
    sender, receiver = chance.sample(range(RANKS), 2)
    if not link:
        return Plant(sender, slower=chance.uniform(1.3, 3.0))
    return Plant(sender, receiver, rate=setting.shard_bytes / chance.uniform(0.2, 0.8))


def in_turn(plants: list[Plant], others: list[Plant]) -> list[Plant]:
    """One of each, then what is left: a campaign that is ended early has seen both."""
    pairs = [plant for pair in zip(plants, others, strict=False) for plant in pair]
    return [*pairs, *plants[len(others) :], *others[len(plants) :]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.observe", description=__doc__)
    parser.add_argument(
        "--plants", type=int, default=20, help="plants, half of them ranks, half of them wires"
    )
    parser.add_argument("--undisturbed", type=int, default=20, help="runs without a plant")
    parser.add_argument("--samples", type=int, default=5, help="sampled steps of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timed",
        action="store_true",
        help="ranks compute by the clock, for a machine with too few cores",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chance, setting = random.Random(options.seed), TIMED if options.timed else REAL
    plants = [random_plant(chance, setting, number % 2 == 1) for number in range(options.plants)]
    mesh = ThrottledMesh(RANKS)
    ranks, found = Ranks(RANKS, mesh.ends), []
    try:
        for plant in in_turn(plants, [Plant()] * options.undisturbed):
            lines, records = try_plant(ranks, mesh, setting, plant, options.samples)
            kind = "undisturbed" if plant.rank < 0 else "link" if plant.rate else "rank"
            found.append({"kind": kind, "right": plant.named_by(lines), "lines": lines, "plant": vars(plant),
                          "exposed": records[-1]["exposed_share"]})  # fmt: skip
            if not options.json:
                print(
                    kind,
                    "right" if found[-1]["right"] else f"WRONG: {plant}",
                    *lines,
                    sep="; ",
                    flush=True,
                )
    finally:
        ranks.close()
        mesh.close()
    right = {kind: (sum(each["right"] for each in found if each["kind"] == kind), sum(each["kind"] == kind for each in found))
             for kind in ("rank", "link", "undisturbed")}  # fmt: skip
    if options.json:
        print(json.dumps({**facts(), "setting": vars(setting), "right": right, "runs": found}))
    else:
        print(", ".join(f"{kind}: {good} of {all_} right" for kind, (good, all_) in right.items()))
    return int(any(good < all_ for good, all_ in right.values()))


if __name__ == "__main__":
    sys.exit(main())
