"""Covering arrays: few rows in which every allowed pair of values of two factors occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

Row = dict[str, str]
Factors = Mapping[str, Sequence[str]]
Pair = tuple[str, str, str, str]  # factor, value, factor, value; in the order of the factors
_TRIES = 60


def cover(
    factors: Factors,
    allowed: Callable[[Row], bool],
    count: int,
    seed: int,
    wanted: Iterable[Row] = (),
) -> tuple[list[Row], set[Pair]]:
    """`count` rows, and the pairs that are in none of them although they are allowed by themselves.

    Each row begins with one of `wanted`, then with a pair that no row has, and takes of each
    further factor, in random order, the value with the most new pairs; the first one where there is
    none. Rows beyond those needed are random.

    allowed: whether the values of a part of a row go together.
    """
    random = np.random.default_rng(seed)
    missing = {pair for pair in _pairs(factors) if allowed(_row(pair))}
    rows: list[Row] = []
    hopeless: set[Pair] = set()
    starts = list(wanted)
    while len(rows) < count:
        open_pairs = sorted(missing - hopeless)
        pair = open_pairs[random.integers(len(open_pairs))] if open_pairs else None
        start = starts.pop(0) if starts else _row(pair) if pair else {}
        new = missing - hopeless
        row = next(
            (
                found
                for _ in range(_TRIES)
                if (found := _filled(start, factors, allowed, new, random))
            ),
            None,
        )
        if row is None and pair is not None and start == _row(pair):
            hopeless.add(pair)
        elif row is None:
            raise ValueError(f"nothing allowed goes with {start}")
        elif row not in rows:
            rows.append(row)
            missing -= set(_pairs_of(row, factors))
    return rows, missing


def _pairs(factors: Factors) -> list[Pair]:
    return [
        (a, x, b, y)
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    ]


def _pairs_of(row: Row, factors: Factors) -> list[Pair]:
    return [
        (a, row[a], b, row[b])
        for a, b in itertools.combinations(factors, 2)
        if a in row and b in row
    ]


def _row(pair: Pair) -> Row:
    return {pair[0]: pair[1], pair[2]: pair[3]}


def _filled(
    start: Row,
    factors: Factors,
    allowed: Callable[[Row], bool],
    missing: set[Pair],
    random: np.random.Generator,
) -> Row | None:
    """A whole row that begins with `start`; None at a dead end."""
    row = dict(start)
    for factor in random.permutation([name for name in factors if name not in start]).tolist():
        fit = [value for value in factors[factor] if allowed(row | {factor: value})]
        if not fit:
            return None
        gains = [
            len(missing.intersection(_pairs_of(row | {factor: value}, factors))) for value in fit
        ]
        best = [value for value, gain in zip(fit, gains, strict=True) if gain == max(gains)]
        row[factor] = (
            best[0] if missing and max(gains) == min(gains) else best[random.integers(len(best))]
        )
    return {name: row[name] for name in factors}
