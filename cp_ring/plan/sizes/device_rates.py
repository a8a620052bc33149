"""What devices and links do in a second, for predicted times. The defaults are assumptions, not
measurements.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import PlanError

FLOPS_PER_SECOND = 4e14
"""What an attention kernel reaches on an H100, by default."""

NETWORK_BYTES_PER_SECOND = 4e10
"""What a network card of 400 Gb/s receives from other nodes, and sends at the same time, by
default.
"""

NVLINK_BYTES_PER_SECOND = 3e11
"""What a rank receives from other ranks of its node, and sends at the same time, by default."""

MEMORY_BYTES_PER_SECOND = 3e12
"""What an H100 reads and writes, by default."""

SECONDS_PER_CALL = 2e-5
"""What a kernel call loses while its first and last blocks do not fill the device."""


@dataclass(frozen=True)
class Rates:
    """What a device and its links do in a second, by default an H100 with NVLink and a network card
    of 400 Gb/s for each rank.

    flops: FLOP of attention, forward and backward alike.
    inside: bytes that a rank receives from ranks of its own node, and sends to them at the same
    time.
    between: bytes that a network card receives from other nodes, and sends to them at the same
    time.
    ranks_per_card: neighboring ranks of a node that share a network card.
    memory: bytes that a device reads and writes.
    call: seconds that a kernel call loses, and an exchange of heads.
    products: FLOP of the matrix products of other layers, relative to `flops`. 600 TFLOP/s are
    assumed of an H100, by default.
    block: tokens of the square blocks in which a kernel computes beside the edges of a mask; 1
    counts the allowed pairs alone.
    padded: whether a block at the end of a tile counts whole, so that a tile of 4 tokens costs a
    block.
    processors: streaming multiprocessors, whose blocks are counted (`cp_ring.plan.costs.waves`):
    `flops` is then the speed of the call `REFERENCE` there, and `call` is what a kernel call takes
    at least. 0 counts none.
    streams: those of kernel calls, of which so many may then run at a time; in backward too if
    messages are `urgent`.

    Raises `PlanError` unless all other numbers are above 0, and `processors` is a whole number.
    """

    flops: float = FLOPS_PER_SECOND
    inside: float = NVLINK_BYTES_PER_SECOND
    between: float = NETWORK_BYTES_PER_SECOND
    ranks_per_card: int = 1
    memory: float = MEMORY_BYTES_PER_SECOND
    call: float = SECONDS_PER_CALL
    products: float = 1.5
    block: int = 1
    padded: bool = False
    processors: int = 0
    streams: int = 1
    urgent: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.processors, int) or self.processors < 0:
            raise PlanError(f"processors={self.processors}: it must be a whole number, or 0")
        for field in fields(self)[:-4]:
            if not 0 < getattr(self, field.name) < float("inf"):
                raise PlanError(
                    f"{field.name}={getattr(self, field.name)}: a rate must be a number above 0"
                )


def stage_seconds(computes: NDArray[Any], *moves: NDArray[Any]) -> NDArray[Any]:
    """The rule of the model of time: a stage lasts as long as the longest of what is computed and
    what moves during it.
    """
    for moving in moves:
        computes = np.maximum(computes, moving)
    return computes


RATES = Rates(processors=132)
"""The rates that all predictions assume where none are given."""

HOST_RATES = Rates(flops=5e10, inside=2e9, between=1e9, memory=1e10, call=1e-4)
"""Assumed of a rank on the CPU, with gloo."""

NAMED = {
    "h100-nvlink-400g": RATES,
    "h100-nvlink-200g": replace(RATES, between=2e10),
    "h200-nvlink-400g": replace(RATES, memory=4.3e12),
    "a100-nvlink-200g": Rates(1.9e14, 2e11, 2e10, memory=1.7e12, products=1.25, processors=108),
}
"""Rates by the names of devices and links. The links are those of vendors' data sheets, less what
protocols take; all of them are assumptions, not measurements."""


def named_or_read(text: str) -> Rates:
    """The rates of a name in `NAMED`, or of a file. Raises `PlanError` that begins with --rates."""
    if text in NAMED:
        return NAMED[text]
    if not os.path.exists(text):
        raise PlanError(f"--rates {text}: no such file, nor one of {', '.join(NAMED)}")
    return read(text)


_IN_FILE = {
    "tflops": ("flops", 1e12),
    "link_gb_s": ("inside", 1e9),
    "network_gb_s": ("between", 1e9),
    "memory_gb_s": ("memory", 1e9),
    "call_us": ("call", 1e-6),
    "ranks_per_card": ("ranks_per_card", 1),
    "processors": ("processors", 1),
}


def read(path: str) -> Rates:
    """The rates of a JSON file, as preflight writes it (links.json).

    The file may have any of tflops, memory_gb_s, call_us, link_gb_s (ranks of a node), network_gb_s
    (other nodes), ranks_per_card and processors; `RATES` has what it lacks, or has as null, but
    processors beside tflops, which are then not counted. Raises `PlanError` with the reason where
    the file has no rates.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content: Any = json.load(file)
    except OSError as error:
        raise PlanError(f"--rates {path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise PlanError(f"--rates {path}: not valid JSON") from None
    rates: dict[str, Any] = {}
    if isinstance(content, dict):
        rates = {key: content[key] for key in _IN_FILE if content.get(key) is not None}
    if not rates:
        raise PlanError(
            f"--rates {path}: it has none of {', '.join(_IN_FILE)}, as preflight writes them"
        )
    for key, value in rates.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < float("inf")
        ):
            raise PlanError(f"--rates {path}: {key} {value!r}: it must be a number above 0")
    values = {_IN_FILE[key][0]: value * _IN_FILE[key][1] for key, value in rates.items()}
    return replace(Rates() if "tflops" in rates else RATES, **values)
