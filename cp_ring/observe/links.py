"""The speeds of the links between the ranks, as preflight measured them: a file in the run
directory.

The file also holds the rates of the slowest rank, under the names that
`cp_ring.plan.sizes.device_rates.read` knows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

FILE = "links.json"
FORMAT = "cp_ring links 1"
INSIDE, BETWEEN = "inside nodes", "between nodes"
"""Classes of links: both ranks on one host, or on two."""


class LinkSpeed(NamedTuple):
    """The speed of one link, measured by the receiving rank: the best rate in bytes per second, the
    latency in seconds.

    `hop`: the hop of the ring whose messages take this link, 0 for another link.
    """

    hop: int
    sender: int
    receiver: int
    rate: float
    latency: float


def class_of(hosts: Sequence[str] | dict[int, str], sender: int, receiver: int) -> str:
    """`INSIDE` or `BETWEEN`, from the host of each rank."""
    return INSIDE if hosts[sender] == hosts[receiver] else BETWEEN


def by_class(hosts: Sequence[str], links: Sequence[LinkSpeed]) -> dict[str, dict[str, float]]:
    """Of each class with links: how many, rates in GB/s (median, slowest, fastest), median latency
    in microseconds.
    """
    classes = {}
    for name in (INSIDE, BETWEEN):
        mine = [link for link in links if class_of(hosts, link.sender, link.receiver) == name]
        if mine:
            rates = [link.rate / 1e9 for link in mine]
            classes[name] = {
                "links": len(mine),
                "gb_s": median(rates),
                "slowest_gb_s": min(rates),
                "fastest_gb_s": max(rates),
                "latency_us": median(link.latency for link in mine) * 1e6,
            }
    return classes


def slowest(hosts: Sequence[str], links: Sequence[LinkSpeed]) -> tuple[float, float] | None:
    """Bytes per second of the slowest link inside a node and of the slowest one between nodes; None
    without links.

    Where there are links of one class only, its rate stands for both.
    """
    rates = {name: 1e9 * of["slowest_gb_s"] for name, of in by_class(hosts, links).items()}
    if not rates:
        return None
    inside = rates.get(INSIDE)
    between = rates.get(BETWEEN)
    return inside or between or 0.0, between or inside or 0.0


def record(
    hosts: Sequence[str],
    links: Sequence[LinkSpeed],
    pairs: Sequence[LinkSpeed],
    rates: dict[str, Any],
) -> dict[str, Any]:
    """The content of the file.

    Args:
        hosts: the host of each rank.
        links: the hops of the context-parallel groups, all groups at once, as in training.
        pairs: links of all ranks with each other, as far as they were measured.
        rates: what the slowest rank does in a second.
    """
    size = len(hosts)
    gb_s: list[list[Any]] = [[None] * size for _ in hosts]
    latency: list[list[Any]] = [[None] * size for _ in hosts]
    for link in pairs:
        gb_s[link.sender][link.receiver] = _digits(link.rate / 1e9)
        latency[link.sender][link.receiver] = _digits(link.latency * 1e6)
    inside, between = slowest(hosts, [*links, *pairs]) or (None, None)
    return {
        "format": FORMAT,
        "hosts": list(hosts),
        **{name: _digits(value) for name, value in rates.items()},
        "link_gb_s": _digits(inside and inside / 1e9),
        "network_gb_s": _digits(between and between / 1e9),
        "ring": _rounded(by_class(hosts, [link for link in links if link.hop == 1])),
        "pairs": _rounded(by_class(hosts, pairs)),
        "gb_s": gb_s,
        "latency_us": latency,
    }


def possible(folder: str) -> dict[str, float]:
    """Bytes per second of each link class: the median on the ring, or of other links; {} where
    preflight has measured none.
    """
    if not folder:
        return {}
    try:
        recorded = json.loads((Path(folder) / FILE).read_text())
        return {
            name: 1e9 * float(of["gb_s"])
            for name, of in {**recorded["pairs"], **recorded["ring"]}.items()
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _rounded(classes: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    return {
        name: {key: _digits(value) for key, value in of.items()} for name, of in classes.items()
    }


def _digits(value: Any) -> Any:
    """A number with four digits, more than such a measurement has; anything else as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
