"""Parsers of option values that several commands share, for `typer.Option(parser=...)`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]
Heads = Annotated[int, typer.Option(min=1, help="Heads of queries, keys and values.")]
HeadDim = Annotated[int, typer.Option(min=1, help="Size of a head.")]

_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_NUMBER = re.compile(r"([+-]?\d[\d_]*(?:\.\d+)?)([kmg]?)", re.IGNORECASE)


def parse_tokens(text: str | int) -> int:
    """A number of tokens: 65536, 64K, 128k or 1M, where K is 1,024, M is 1,024 K and G is 1,024 M.

    Raises `typer.BadParameter`. Typer turns it into one line that names the option.
    """
    found = _NUMBER.fullmatch(str(text).strip())
    value = float(found[1].replace("_", "")) * _FACTORS[found[2].lower()] if found and "." in found[1] else None
    if found and value is None:
        return int(found[1]) * _FACTORS[found[2].lower()]
    if value is None or value != int(value):
        raise typer.BadParameter(f"{str(text)!r} is not a number of tokens such as 65536, 64K or 1M")
    return int(value)


def parse_mean_tokens(text: str | float) -> float:
    """An average number of tokens: any number, or a text that `parse_tokens` accepts."""
    try:
        return float(text)
    except ValueError:
        return float(parse_tokens(str(text)))
