"""How far the clocks of the ranks are apart. Ranks of one running system share a clock; others
compare theirs by messages.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cp_ring.observe import timing

ROUNDS = 8
"""Messages to and fro; the quickest of them counts."""


class ClockOffset(NamedTuple):
    """The clock of a rank shows `seconds` where that of the group's first rank shows 0, give or
    take `error` seconds.
    """

    seconds: float
    error: float


def boot() -> str:
    """An identifier of the running system, the same for all its processes; containers of a host
    share it.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(uuid.uuid4())


def offset(group: Any) -> ClockOffset:
    """The offset of this rank's clock from that of the first rank of `group`. All its ranks call
    this together.

    Ranks whose system is that of the first rank have the same clock, and send nothing. The error of
    others is half the time of the quickest message to the first rank and back.
    """
    boots: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(boots, boot(), group=group)
    rank = dist.get_rank(group)
    known_offset = ClockOffset(0.0, 0.0)
    for other in (place for place, system in enumerate(boots) if system != boots[0]):
        if rank == 0:
            _answer(group, other)
        elif rank == other:
            known_offset = _ask(group)
    return known_offset


def _device(group: Any) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _answer(group: Any, other: int) -> None:
    message = torch.zeros(1, dtype=torch.float64, device=_device(group))
    for _ in range(ROUNDS):
        dist.recv(message, group=group, group_src=other)
        message.item()  # the message is here, also where a device received it
        message.fill_(timing.clock())
        dist.send(message, group=group, group_dst=other)


def _ask(group: Any) -> ClockOffset:
    message = torch.zeros(1, dtype=torch.float64, device=_device(group))
    rounds = []
    for _ in range(ROUNDS):
        begin = timing.clock()
        dist.send(message, group=group, group_dst=0)
        dist.recv(message, group=group, group_src=0)
        first_clock = message.item()
        end = timing.clock()
        rounds.append((end - begin, (begin + end) / 2 - first_clock))
    trip, difference = min(rounds)
    return ClockOffset(difference, trip / 2)
