"""Attacks on cp_ring, generated and harmless: `python -m tests.adversary [--json] [--only ATTACK]`.

To add an attack, write a function that yields a `Try` for each try, mark it with `@attack("name")` in a module of this package,
and import that module in `tests/adversary/__main__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Try:
    """One try of an attack. problem: what the attack achieved, or "" where cp_ring held."""

    name: str
    problem: str = ""


Attack = Callable[[Path], Iterator[Try]]
ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """Registers a function, which gets an empty folder, as the attack `name`."""

    def register(function: Attack) -> Attack:
        assert name not in ATTACKS, name
        ATTACKS[name] = function
        return function

    return register
