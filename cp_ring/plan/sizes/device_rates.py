"""Rates of devices and links for predicted times, from `cp_ring/plan/rates`: a file a device. All
are assumptions until a measurement replaces a file; each says so.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from cp_ring.runtime import RUNTIME

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
"""The rates of ranks without a GPU, by which hops are chosen everywhere."""

_running = RUNTIME.cell(RATES)


def running() -> Rates:
    """Return the rates of the device that runs, by which layouts and heads are chosen:
    `RATES` until `use` names another.
    """
    return _running.value


def use(device: str) -> None:
    """Choose by the rates of a device from now on: a name in `NAMED`, or torch's name of a GPU,
    such as `NVIDIA H100 80GB HBM3`. A line says once that others are taken for an H100.
    """
    _running.value = NAMED.get(device) or _of_gpu(device)


@RUNTIME.cache()
def _of_gpu(name: str) -> Rates:
    for known in (path.stem for path in FOLDER.glob("*.json")):
        if re.search(rf"{known}(?!\d)", name, re.IGNORECASE):
            return NAMED[known]
    warnings.warn(
        f"cp_ring knows no rates of {name}: it chooses layouts and heads as for an H100",
        stacklevel=3,
    )
    return NAMED["h100"]
