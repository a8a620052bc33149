"""Rates of devices and links for predicted times. The defaults are assumptions, not
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from cp_ring.errors import PlanError

FLOPS_PER_SECOND = 4e14
"""The default for the speed of an attention kernel on an H100."""

NETWORK_BYTES_PER_SECOND = 4e10
"""The default for a network card of 400 Gb/s: bytes from other nodes, and as many to them at the
same time.
"""

NVLINK_BYTES_PER_SECOND = 3e11
"""The default for NVLink: bytes from other ranks of the node, and as many to them at the same
time.
"""

MEMORY_BYTES_PER_SECOND = 3e12
"""The default for the memory of an H100: bytes read and written."""

SECONDS_PER_CALL = 2e-5
"""The seconds that a kernel call loses while its first and last blocks do not fill the device."""


PROCESSORS = 132.0
"""The default for the streaming multiprocessors of an H100."""


@dataclass(frozen=True)
class Rates:
    """Rates of a device and its links a second; by default an H100 with NVLink and a network card
    of 400 Gb/s for each rank.

    flops: FLOP of attention, forward and backward alike.
    inside, between: bytes that a rank receives from ranks of its own node, and from other nodes,
    and sends to them at the same time.
    memory: bytes that a device reads and writes.
    call: seconds that a kernel call loses, and an exchange of heads.
    processors: how many parts of the device compute one block of a kernel call each at a time.
    products: FLOP of the matrix products of other layers, relative to `flops`; by default 600
    TFLOP/s for an H100.

    Raises `PlanError` unless all are above 0.
    """

    flops: float = FLOPS_PER_SECOND
    inside: float = NVLINK_BYTES_PER_SECOND
    between: float = NETWORK_BYTES_PER_SECOND
    memory: float = MEMORY_BYTES_PER_SECOND
    call: float = SECONDS_PER_CALL
    processors: float = PROCESSORS
    products: float = 1.5

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < float("inf"):
                raise PlanError(
                    f"{field.name}={getattr(self, field.name)}: a rate must be a number above 0"
                )


RATES = Rates()
"""The rates that predictions assume if none are given."""

NAMED = {
    "h100-nvlink-400g": RATES,
    "h100-nvlink-200g": replace(RATES, between=2e10),
    "h200-nvlink-400g": replace(RATES, memory=4.3e12),
    "a100-nvlink-200g": Rates(1.9e14, 2e11, 2e10, memory=1.7e12, processors=108, products=1.25),
}
"""Rates by the names of devices and links. The links are those of vendors' data sheets, less the
overhead of protocols; all of them are assumptions, not measurements.
"""
