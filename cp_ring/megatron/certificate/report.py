"""What the probes found: one line each, whether it holds, and the file beside the checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Probe:
    """One probe of one kind of layer, on one rank or, once merged, the worst of all ranks.

    `error` must not exceed `bound`; `where` names the worst place: rank, and the positions of a query and a key.
    """

    name: str
    layer: str
    mask: str
    error: float
    bound: float
    where: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the bound."""
        return self.error <= self.bound

    def refusal(self) -> str:
        """One line for a probe that did not pass."""
        amount = f"off by {self.error:.2g} (bound {self.bound:.2g})" if self.bound else f"wrong in {self.error:.0f} pairs"
        return f"--cp-ring-certify: {self.layer}, {self.mask}: {self.name} {amount}, {self.where}"


@dataclass
class Certificate:
    """The probes of a job, what they were about, and how long they took."""

    probes: list[Probe] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failures(self) -> list[Probe]:
        """The probes that did not pass; those that name a pair of positions first."""
        failed = [probe for probe in self.probes if not probe.passed]
        return sorted(failed, key=lambda probe: probe.bound > 0)

    def merge(self, of_ranks: list[list[Probe]]) -> None:
        """Takes the worst of all ranks for each probe; all made the same ones in the same order."""
        worst = [max(same, key=_badness) for same in zip(*of_ranks, strict=True)]
        self.probes = worst

    def as_dict(self) -> dict[str, Any]:
        """As it is written to a file."""
        return {
            "about": self.about,
            "seconds": round(self.seconds, 3),
            "probes": [asdict(p) | {"passed": p.passed} for p in self.probes],
        }


def _badness(probe: Probe) -> float:
    return float("inf") if probe.error != probe.error else probe.error / probe.bound if probe.bound else probe.error
