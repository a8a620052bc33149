"""Cells of the parity matrix: a job with context parallelism against the same model without, and how far they are apart.

A baseline has context parallel size 1 and no data parallelism; its other sizes are those of the cell only where they change how
weights are drawn.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.megatron.launch import Outcome, attempt
from tests.parity.rows import COLUMNS, COMMON, ROWS, Column, Row


@dataclass(frozen=True)
class Job:
    """A training job: flags beside `COMMON`, on `ranks` ranks; `fault` is planted in it, and `data` says how its batches come."""

    name: str
    ranks: int
    flags: tuple[str, ...]
    fault: str = ""
    data: str = ""


@dataclass(frozen=True)
class Cell:
    """One model under one split; with `planted` the row's fault is in it."""

    row: Row
    column: Column
    planted: bool = False

    def job(self) -> Job:
        """Training with ring attention."""
        column, row = self.column, self.row
        name = f"{row.name}-{column.name}{'-planted' if self.planted else ''}"
        ranks = column.cp * column.tp * column.pp * column.dp
        flags = [*self._flags(column.tp), "--cp-ring", "--context-parallel-size", str(column.cp), *row.ring.split()]
        return Job(name, ranks, tuple(flags), row.fault if self.planted else "", row.data)

    def baseline(self) -> Job:
        """The same model at context parallel size 1, on as few ranks as draw the same weights."""
        row, pp = self.row, self.column.pp
        tp = self.column.tp if row.drawn_by_tp else 1
        flags = (*self._flags(tp), *row.baseline.split())
        return Job(f"{row.name}-baseline-tp{tp}pp{pp}", max(tp, row.experts) * pp, flags, data=row.data)

    def _flags(self, tp: int) -> list[str]:
        row = self.row
        sizes = {
            "--num-layers": row.layers,
            "--seq-length": row.sequence,
            "--tensor-model-parallel-size": tp,
            "--pipeline-model-parallel-size": self.column.pp,
            "--expert-model-parallel-size": row.experts,
        }
        return [*row.flags.split(), *(word for name, size in sizes.items() for word in (name, str(size)))]


@dataclass(frozen=True)
class Verdict:
    """Largest relative errors of a cell over all steps and the validation pass; or why there are none."""

    cell: Cell
    loss_error: float | None = None
    grad_norm_error: float | None = None
    refused: str = ""
    failed: str = ""

    @property
    def ok(self) -> bool:
        """Trained, and as exactly as the row asks for."""
        errors = self.loss_error, self.grad_norm_error
        return None not in errors and max(errors) <= self.cell.row.tolerance

    @property
    def expected(self) -> bool:
        """As it should be: right, refused where the row says so, or wrong where a fault is planted."""
        if self.failed:
            return False
        reason = self.cell.row.refused.get(self.cell.column.name, "")
        if self.refused or reason:
            return bool(reason) and reason in self.refused
        return self.ok is not self.cell.planted

    def as_dict(self) -> dict[str, Any]:
        """The cell's row of the JSON output."""
        label = {"model": self.cell.row.name, "parallel": self.cell.column.name}
        if self.refused:
            return label | {"refused": self.refused}
        if self.failed:
            return label | {"ok": False, "failed": self.failed}
        return label | {"loss_error": self.loss_error, "grad_norm_error": self.grad_norm_error, "ok": self.ok}


def compare(cell: Cell, ours: Outcome, theirs: Outcome) -> Verdict:
    """How far a cell's job is from its baseline."""
    for what, prefix in ((ours, ""), (theirs, "baseline: ")):
        if what.refused:
            return Verdict(cell, refused=prefix + what.refused)
        if what.code:
            return Verdict(cell, failed=f"{prefix}exit code {what.code}\n{what.output}")
    losses, expected = [*ours.losses, *ours.validation], [*theirs.losses, *theirs.validation]
    if not len(theirs.losses) == len(theirs.grad_norms) == 3 or not theirs.validation:
        return Verdict(cell, failed=f"the baseline did not train 3 steps with a validation pass: {theirs}")
    if len(losses) != len(expected) or len(ours.grad_norms) != 3:
        return Verdict(cell, failed=f"other steps than the baseline: {ours}")
    return Verdict(cell, _error(losses, expected), _error(ours.grad_norms, theirs.grad_norms))


def _error(ours: list[float], theirs: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(ours, theirs, strict=True))


def cells(rows: Iterable[str] = (), columns: Iterable[str] = (), planted: bool = False) -> list[Cell]:
    """The cells of the named rows and columns, by default of all. Raises `KeyError` for an unknown name."""
    by_row, by_column = {row.name: row for row in ROWS}, {column.name: column for column in COLUMNS}
    chosen = [by_column[name] for name in columns] or list(COLUMNS)
    return [
        Cell(row, column, planted)
        for row in ([by_row[name] for name in rows] or ROWS)
        for column in chosen
        if not row.columns or column.name in row.columns
    ]


def run(
    wanted: Iterable[Cell], folder: Path | None = None, tell: Callable[[str], None] = lambda line: None
) -> dict[Cell, Verdict]:
    """Trains the cells and their baselines, each once; calls `tell` with a line after each job."""
    wanted, outcomes = list(wanted), {}
    jobs = {job.name: job for cell in wanted for job in (cell.baseline(), cell.job())}
    with tempfile.TemporaryDirectory() as temporary:
        for name, job in jobs.items():
            begun = time.monotonic()
            outcomes[name] = attempt(job.ranks, name, list(job.flags), folder or Path(temporary), COMMON, job.fault, job.data)
            tell(f"{len(outcomes)} of {len(jobs)}: {name}, {time.monotonic() - begun:.1f} s")
    return {cell: compare(cell, outcomes[cell.job().name], outcomes[cell.baseline().name]) for cell in wanted}
