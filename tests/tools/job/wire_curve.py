"""Trains the quickstart's model with each codec, and compares validation losses:
`python -m tests.tools.job.wire_curve FOLDER`.

FOLDER gets curve.json (validation losses by run and step), curve.png, and the run directories. Runs
that are done are kept. The same model at context parallel size 1 shows how far rounding alone moves
the losses.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

RUNS = {"plain": ("plain", 2), "int8": ("int8", 2), "fp8": ("fp8", 2), "cp 1": ("plain", 1)}
"""The codec and the context-parallel size of each run."""

LIMIT = 0.005
"""How far the last validation loss may be above that of plain, relative."""

RATE = 1e-3
"""At the quickstart's own rate, 4e-3, small differences grow: runs that differ in rounding alone
are 0.2 % apart in the end.
"""

_VALIDATION = re.compile(r"validation loss at iteration (\d+) \| lm loss value: (\S+)")


def losses(
    folder: Path, name: str, steps: int, interval: int, tokens: int, rate: float = RATE
) -> dict[int, float]:
    """Validation losses by step of a run, trained in `folder`, with a learning rate that rises to
    `rate` and falls to 0.

    tokens: of a batch row; a step has 2, and a validation pass 32. Raises `RuntimeError` if
    training fails.
    """
    wire, cp = RUNS[name]
    run = folder / name.replace(" ", "")
    settings = {
        "cp_ring.wire": wire, "parallel.context_parallel_size": cp, "megatron.train_iters": steps,
        "megatron.seq_length": tokens,
        "megatron.lr": rate, "megatron.lr_warmup_iters": steps // 10, "megatron.lr_decay_style":
        "cosine",
        "megatron.lr_decay_iters": steps, "megatron.eval_interval": interval,
        "megatron.eval_iters": 16, "megatron.save_interval": steps, "launch.run_dir": run,
        "launch.device":
        "cpu",
        "data.cache": folder / "corpora",
    }  # fmt: skip
    line = [sys.executable, "-m", "cp_ring.tools", "train", "quickstart"]
    if not (run / "DONE").exists():
        done = subprocess.run(
            [
                *line,
                *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")),
            ]
        )
        if done.returncode:
            raise RuntimeError(f"{name}: exit code {done.returncode}")
    log = max((run / "logs").glob("train-*.log")).read_text()
    return {int(step): float(loss) for step, loss in _VALIDATION.findall(log)}


def main(
    folder: Annotated[Path, typer.Argument(help="Where runs and losses go.")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 300,
    interval: Annotated[int, typer.Option(min=1, help="Steps between validations.")] = 50,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a batch row.")] = 512,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = RATE,
) -> None:
    """Train with each codec; exit code 1 if the last validation loss of one is too far above that
    of plain.
    """
    curves = {name: losses(folder, name, steps, interval, tokens, rate) for name in RUNS}
    (folder / "curve.json").write_text(json.dumps(curves, indent=1) + "\n")
    off = {name: curve[steps] / curves["plain"][steps] - 1 for name, curve in curves.items()}
    print(
        "; ".join(f"{name} {curves[name][steps]:.4f}, {value:+.2%}" for name, value in off.items())
    )
    raise typer.Exit(int(max(off.values()) > LIMIT))


if __name__ == "__main__":
    typer.run(main)
