"""The results of the probes, and the lines about them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Probe:
    """The result of one probe of one kind of layer, on one rank or, once merged, the worst of all
    ranks.

    `error` must not exceed `bound`. `where` names the worst place: the positions of a query and a
    key and, once merged, its rank. If `bound` is 0, `error` counts faults in the given `unit`.
    """

    name: str
    layer: str
    mask: str
    error: float
    bound: float
    where: str = ""
    unit: str = "pairs"

    def rejection(self) -> str:
        """Return one line for a failed probe."""
        amount = (
            f"off by {self.error:.2g} (bound {self.bound:.2g})"
            if self.bound
            else f"wrong in {self.error:.0f} {self.unit}"
        )
        return f"--cp-ring-certify: {self.layer}, {self.mask}: {self.name} {amount}, {self.where}"


@dataclass
class Certificate:
    """The probes of a job, a description of the job, what the probes left out, and how long they
    took.

    `up_to` tells, by layer and mask, how far the probes went if the job goes further.
    """

    probes: list[Probe] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    not_covered: list[str] = field(default_factory=list)
    up_to: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failures(self) -> list[Probe]:
        """Return the failed probes, whose error is no number within the bound; those that name a
        pair of positions come first.
        """
        failed = [probe for probe in self.probes if not probe.error <= probe.bound]
        return sorted(failed, key=lambda probe: probe.bound > 0)

    def merge(self, of_ranks: list[list[Probe]]) -> None:
        """Keep the worst result of all ranks for each probe, and each gap once."""
        self.not_covered = [*dict.fromkeys(self.not_covered)]
        worst: dict[tuple[str, str, str], Probe] = {}
        for rank, probes in enumerate(of_ranks):
            for each in probes:
                probe = replace(each, where=f"rank {rank}: {each.where}".rstrip(": "))
                key = probe.name, probe.layer, probe.mask
                worst[key] = max(
                    worst.get(key, probe),
                    probe,
                    key=lambda each: (math.isnan(each.error), each.error),
                )
        self.probes = list(worst.values())

    def problem(self, strict: bool) -> str:
        """Return why the job must not train, in one line, or ""."""
        if failures := self.failures:
            more = f" (and {len(failures) - 1} more probes failed)" if len(failures) > 1 else ""
            return failures[0].rejection() + more
        if strict and self.not_covered:
            return (
                f"--cp-ring-certify strict: the probes do not cover {', '.join(self.not_covered)}; "
                "to train all the same, give --cp-ring-certify on"
            )
        return ""

    def summary(self) -> str:
        """Return one line: what was not probed, what was, and how long it took."""
        layers = sorted({f"{probe.layer} under {probe.mask}" for probe in self.probes})
        reach = self.up_to
        shown = "; ".join(f"{at}, up to {reach[at]}" if at in reach else at for at in layers)
        missing = f"not covered: {', '.join(self.not_covered)}; " if self.not_covered else ""
        passed = f"{len(self.probes)} probes passed in {self.seconds:.1f} s"
        return f"certificate: {missing}{passed}" + f" ({shown})" * bool(shown)
