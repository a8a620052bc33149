"""The pairwise table:
`python -m tests.pairwise [--count 200] [--seed 1] [--only 3,10..20] [--lanes 2] [--show]`.

One line for each row: equal to context parallel size 1 (with its largest relative error), rejected
in one line before training, or WRONG. Exit code 1 if a row is wrong: another loss or gradient norm,
a traceback, or a rejection of what the documents support, or by another line than they say.
"""

from __future__ import annotations

import collections
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from tests.megatron.launch import Outcome, attempt
from tests.pairwise.covering import Row
from tests.pairwise.table import FACTORS, Case, rows
from tests.parity.matrix import Job, Verdict
from tests.parity.models import COMMON


def run(case: Case, folder: Path) -> tuple[Verdict, str]:
    """Trains a row: its jobs until one fails, else its baseline too. Returns the numbers of all of
    them too, as text.
    """
    outcomes: list[Outcome] = []
    for job in case.before:
        saved = _attempt(job, folder)
        if saved.code:
            return case.verdict([saved], Outcome()), ""
    for job in case.jobs:
        outcomes.append(_attempt(job, folder))
        if outcomes[-1].code:
            return case.verdict(outcomes, Outcome()), ""
    baseline = _attempt(case.baseline, folder)
    numbers = [
        f"{found.losses} {found.grad_norms} {found.validation}" for found in (*outcomes, baseline)
    ]
    return case.verdict(outcomes, baseline), "; ".join(numbers)


def last_words(output: str) -> str:
    """The exit code and the last line of a failed job that names an error."""
    code, *lines = output.splitlines()
    errors = [
        line for line in lines if "Error: " in line and "Connection closed by peer" not in line
    ]
    return f"{code}: {(errors or lines)[0] if errors or lines else ''}"


def _attempt(job: Job, folder: Path) -> Outcome:
    return attempt(job.ranks, job.name, job.argv(folder), folder, COMMON, job.fault, job.data)


def right(verdict: Verdict, line: str) -> bool:
    """Whether a row trained as context parallel size 1 does or, with `line`, was rejected by it."""
    if line or verdict.rejected:
        return bool(line) and line in verdict.rejected and "\n" not in verdict.rejected
    return verdict.ok


def shown(row: Row) -> str:
    """The values of a row that are not the first ones of their factors."""
    told = [
        name
        for name, values in FACTORS.items()
        if row[name] != values[0] or name in ("model", "split")
    ]
    return ", ".join(f"{name} {row[name]}" for name in told)


def chosen(only: str, count: int) -> list[int]:
    """The numbers in a list such as 3,10..20; all of `count` for an empty one."""
    numbers: list[int] = []
    for part in only.split(",") if only else [f"0..{count - 1}"]:
        first, _, last = part.partition("..")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def main(
    count: Annotated[int, typer.Option(help="Rows of the table.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of what is free in the choice of rows.")] = 1,
    only: Annotated[
        str, typer.Option(help="Numbers of rows, as in 3,10..20; all by default.")
    ] = "",
    lanes: Annotated[int, typer.Option(help="Rows that train at the same time.")] = 2,
    show: Annotated[bool, typer.Option(help="Print the rows and train nothing.")] = False,
) -> None:
    """Trains the rows, each against context parallel size 1; exit code 1 if one is wrong."""
    table = rows(count, seed)
    wanted = chosen(only, count)
    if show:
        for number in wanted:
            print(f"{number}: {shown(table[number][0])}{' [rejected]' * bool(table[number][1])}")
        return
    counts: collections.Counter[str] = collections.Counter()
    worst = 0.0

    def one(number: int) -> tuple[int, Verdict, str, float]:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="cp_ring-pairwise-") as folder:
            verdict, numbers = run(Case.of(number, table[number][0], Path(folder)), Path(folder))
        return number, verdict, numbers, time.monotonic() - begun

    with ThreadPoolExecutor(lanes) as pool:
        for number, verdict, numbers, seconds in pool.map(one, wanted):
            row, line = table[number]
            good = right(verdict, line)
            error = max(verdict.loss_error or 0, verdict.grad_norm_error or 0)
            exact = verdict.cell.model.tolerance <= 2e-6
            worst = max(worst, error if good and exact else 0)
            what = (
                f"rejected: {verdict.rejected}"
                if verdict.rejected
                else f"{error:.1e}{'' if good else f' {numbers}'}"
            )
            what = last_words(verdict.failed) if verdict.failed else what
            print(
                f"{number}: {shown(row)}: {'' if good else 'WRONG: '}{what} ({seconds:.0f} s)",
                flush=True,
            )
            counts[
                "wrong"
                if not good
                else "rejected"
                if verdict.rejected
                else "equal"
                if exact
                else "equal to its bound"
            ] += 1
    print(
        f"{len(wanted)} rows, seed {seed}: {dict(counts)}, largest error of float32 rows "
        f"{worst:.1e}",
        flush=True,
    )
    raise typer.Exit(int(bool(counts["wrong"])))


if __name__ == "__main__":
    typer.run(main)
