"""Rates of devices and links for predicted times, from `cp_ring/plan/rates`: a file a device. All
are assumptions until a measurement replaces a file; each says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "rates"


@dataclass(frozen=True)
class Rates:
    """Rates of a device and its links: amounts a second, and seconds.

    forward, backward: FLOP of attention.
    inside, between: bytes that a rank receives from ranks of its own node, and from other nodes,
    and sends to them at the same time.
    memory: bytes that a device reads and writes.
    products: FLOP of the matrix products of other layers.
    processors: how many parts of the device compute one block of a kernel call each at a time.
    call: seconds that a kernel call loses, and an exchange of heads.
    packed: seconds that a call of several sequences loses beside.
    start: seconds until a group of messages moves.
    host: seconds in which the host issues a hop of forward; one of backward takes twice as many.
    merging: seconds of merges and sums, relative to those of their bytes by `memory`.
    """

    forward: float
    backward: float
    inside: float
    between: float
    memory: float
    products: float
    processors: float
    call: float = 0.0
    packed: float = 0.0
    start: float = 0.0
    host: float = 0.0
    merging: float = 0.0


def _read() -> dict[str, Rates]:
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        values = json.loads(path.read_text())
        del values["source"]
        for kernel, (forward, backward) in values.pop("kernels").items():
            name = f"{path.stem}-{kernel}" if path.stem in found else path.stem
            found[name] = Rates(forward, backward, **values)
    return found


NAMED = _read()
"""Rates by the name of a device, with its fastest kernel, or of a device and another kernel, as in
`h100-flash_aten`.
"""

RATES = NAMED["cpu"]
"""The rates by which plans are chosen if none are given."""
