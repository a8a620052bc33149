"""Cells of the parity matrix: the errors of a job with context parallelism against the same model
without it.

A baseline has context and tensor parallel size 1, no data parallelism and no pipeline stages.
Pipeline stages change how weights are drawn, and in some models tensor parallelism does: such a
cell and its baseline both begin with the weights of a third job's checkpoint. FSDP cannot, so that
its baseline then has the tensor parallel size of the cell.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.megatron.launch import Outcome, attempt
from tests.parity.models import COMMON, MODELS, SPLITS, Model, Split


@dataclass(frozen=True)
class Job:
    """A training job on `ranks` ranks: its flags in addition to `COMMON`, its planted fault, and
    the kind of its microbatches.

    start: the name of the job whose checkpoint it begins with, "" for none.
    """

    name: str
    ranks: int
    flags: tuple[str, ...]
    fault: str = ""
    data: str = ""
    start: str = ""

    def argv(self, folder: Path) -> list[str]:
        """Its flags where checkpoints are in `folder`."""
        if not self.start:
            return list(self.flags)
        saved = str(folder / f"{self.start}-saved")
        if self.start == self.name:
            return [*self.flags, "--train-iters", "1", "--save", saved, "--save-interval", "1"]
        return [*self.flags, "--load", saved, "--finetune", "--no-load-optim", "--no-load-rng"]


@dataclass(frozen=True)
class Cell:
    """One model under one split; with `planted` the model's fault is in it."""

    model: Model
    split: Split
    planted: bool = False

    def job(self) -> Job:
        """Training with ring attention."""
        split, model = self.split, self.model
        name = f"{model.name}-{split.name}{'-planted' if self.planted else ''}"
        ranks = split.cp * split.tp * split.pp * split.dp
        flags = [*self._flags(split.tp), "--cp-ring", "--context-parallel-size", str(split.cp),
                 *model.ring.split(), *split.flags.split()]  # fmt: skip
        return Job(
            name,
            ranks,
            tuple(flags),
            model.fault if self.planted else "",
            model.data,
            self._start(),
        )

    def baseline(self) -> Job:
        """The same model at context parallel size 1 without pipeline stages."""
        model, start = self.model, self._start()
        tp = self.split.tp if self._redrawn and not start else 1
        flags = (*self._flags(tp, 1), *model.baseline.split())
        name = f"{model.name}-baseline-tp{tp}{'-loaded' if start else ''}"
        return Job(name, tp * model.experts, _without_stages(flags), data=model.data, start=start)

    def jobs(self) -> list[Job]:
        """Its jobs, in the order in which they must run."""
        baseline, start = self.baseline(), self._start()
        first = [dataclasses.replace(baseline, name=start)] if start else []
        return [*first, baseline, self.job()]

    def _start(self) -> str:
        other = self.split.pp > 1 or (self._redrawn and "fsdp" not in self.model.ring)
        return f"{self.model.name}-start" if other else ""

    @property
    def _redrawn(self) -> bool:
        """Whether its tensor-parallel ranks draw other weights than one rank does."""
        return self.model.drawn_by_tp and self.split.tp > 1

    def _flags(self, tp: int, pp: int | None = None) -> list[str]:
        model = self.model
        sizes = {
            "--num-layers": model.layers,
            "--seq-length": model.sequence,
            "--tensor-model-parallel-size": tp,
            "--pipeline-model-parallel-size": pp or self.split.pp,
            "--expert-model-parallel-size": model.experts,
        }
        return [
            *model.flags.split(),
            *(word for name, size in sizes.items() for word in (name, str(size))),
        ]


@dataclass(frozen=True)
class Verdict:
    """The largest relative errors of a cell over all steps and the validation pass, or the reason
    why there are none.
    """

    cell: Cell
    loss_error: float | None = None
    grad_norm_error: float | None = None
    rejected: str = ""
    failed: str = ""

    @property
    def ok(self) -> bool:
        """Whether it trained, with errors within the tolerance of the model."""
        errors = self.loss_error, self.grad_norm_error
        return None not in errors and max(errors) <= self.cell.model.tolerance

    @property
    def expected(self) -> bool:
        """Whether the cell is as it must be: right, rejected if the model says so, or wrong if a
        fault is planted.
        """
        if self.failed:
            return False
        reason = self.cell.model.rejected.get(self.cell.split.name, "")
        if self.rejected or reason:
            return bool(reason) and reason in self.rejected
        return self.ok is not self.cell.planted

    def as_dict(self) -> dict[str, Any]:
        """The entry of this cell in the JSON output."""
        label = {"model": self.cell.model.name, "parallel": self.cell.split.name}
        if self.rejected:
            return label | {"rejected": self.rejected}
        if self.failed:
            return label | {"ok": False, "failed": self.failed}
        return label | {
            "loss_error": self.loss_error,
            "grad_norm_error": self.grad_norm_error,
            "ok": self.ok,
        }


def compare(cell: Cell, ours: Outcome, theirs: Outcome) -> Verdict:
    """The errors of a job of a cell against its baseline."""
    for what, prefix in ((ours, ""), (theirs, "baseline: ")):
        if what.rejected:
            return Verdict(cell, rejected=prefix + what.rejected)
        if what.code:
            return Verdict(cell, failed=f"{prefix}exit code {what.code}\n{what.output}")
    losses, expected = [*ours.losses, *ours.validation], [*theirs.losses, *theirs.validation]
    if not len(theirs.losses) == len(theirs.grad_norms) == 3 or not theirs.validation:
        return Verdict(
            cell, failed=f"the baseline did not train 3 steps with a validation pass: {theirs}"
        )
    if len(losses) != len(expected) or len(ours.grad_norms) != 3:
        return Verdict(cell, failed=f"other steps than the baseline: {ours}")
    return Verdict(cell, _error(losses, expected), _error(ours.grad_norms, theirs.grad_norms))


def _without_stages(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags without virtual pipeline stages."""
    word = "--num-layers-per-virtual-pipeline-stage"
    if word not in flags:
        return flags
    at = flags.index(word)
    return (*flags[:at], *flags[at + 2 :])


def _error(ours: list[float], theirs: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(ours, theirs, strict=True))


def cells(
    models: Iterable[str] = (), splits: Iterable[str] = (), planted: bool = False
) -> list[Cell]:
    """The cells of the named models and splits, by default of all. Raises `KeyError` for an unknown
    name.
    """
    by_model, by_split = (
        {model.name: model for model in MODELS},
        {split.name: split for split in SPLITS},
    )
    chosen = [by_split[name] for name in splits] or list(SPLITS)
    return [
        Cell(model, split, planted)
        for model in ([by_model[name] for name in models] or MODELS)
        for split in chosen
        if not model.splits or split.name in model.splits or split.like in model.splits
    ]


def run(
    wanted: Iterable[Cell],
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[Cell, Verdict]:
    """Trains the cells and their baselines, each once; calls `tell` with a line after each job."""
    wanted, outcomes = list(wanted), {}
    jobs = {job.name: job for cell in wanted for job in cell.jobs()}
    with tempfile.TemporaryDirectory() as temporary:
        where = folder or Path(temporary)
        for name, job in jobs.items():
            begun = time.monotonic()
            outcomes[name] = attempt(
                job.ranks, name, job.argv(where), where, COMMON, job.fault, job.data
            )
            tell(f"{len(outcomes)} of {len(jobs)}: {name}, {time.monotonic() - begun:.1f} s")
    return {
        cell: compare(cell, outcomes[cell.job().name], outcomes[cell.baseline().name])
        for cell in wanted
    }
