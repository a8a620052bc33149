"""In which order a rank comes to the keys of the others: the distance between ranks, by which a
schedule counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cp_ring.plan.ranges import Ints
from cp_ring.runtime import RUNTIME


@dataclass(frozen=True)
class Order:
    """Distances between `cp` ranks, of which each `node_size` neighboring ones share a node.

    Each rank has one owner of keys at each distance from 0, itself, to cp - 1. With one rank a
    node, or all ranks on one, the distance of rank r from rank s is (r - s) mod cp. Else it counts
    the node first: distances below `node_size` are those of the rank's own node, the next
    `node_size` those of the node before, and so on. The first distance of a node, a multiple of
    `node_size`, is that of its rank with the same place in the node.

    The functions take numbers or int64 arrays, and return an array where one of the two is an
    array.

    At each distance every rank reads from another owner. So where a hop crosses between nodes, each
    rank sends as much as it receives, and all network cards of a node carry the same.
    """

    cp: int
    node_size: int = 1

    def distance(self, rank: Ints | int, owner: Ints | int) -> Any:
        """The distance of `rank` from `owner`."""
        size = self.node_size
        if size in (1, self.cp):
            return _wrapped(rank - owner, self.cp)
        node, place = _nodes(self.cp, size)
        return _wrapped(node[rank] - node[owner], self.cp) + _wrapped(
            place[rank] - place[owner], size
        )

    def owner(self, rank: Ints | int, distance: Ints | int) -> Any:
        """The owner from which `rank` has this distance."""
        size = self.node_size
        if size in (1, self.cp):
            return (rank - distance) % self.cp
        return (rank // size - distance // size) % (self.cp // size) * size + (
            rank - distance
        ) % size

    def reader(self, owner: Ints | int, distance: Ints | int) -> Any:
        """The rank that has this distance from `owner`."""
        size = self.node_size
        if size in (1, self.cp):
            return (owner + distance) % self.cp
        return (owner // size + distance // size) % (self.cp // size) * size + (
            owner + distance
        ) % size


def _wrapped(number: Any, size: int) -> Any:
    """A number in [-size, size) modulo `size`. Divisions of many numbers take much longer."""
    return number + size * (number < 0)


@RUNTIME.cache(maxsize=64)
def _nodes(cp: int, size: int) -> tuple[Ints, Ints]:
    """Of each rank: the first one of its node, and its place in the node."""
    ranks = np.arange(cp)
    return ranks - ranks % size, ranks % size
