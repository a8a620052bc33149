"""The page of a run: one HTML file that needs nothing else, with curves, slow ranks, the plan,
versions and the certificate.
"""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.observe import progress
from cp_ring.tools.cli.terminal import closing_line, probe_table
from cp_ring.tools.job import job_config as configs
from cp_ring.tools.slurm import attempts
from cp_ring.tools.slurm.status import lines, status

try:
    import matplotlib
    from matplotlib.figure import Figure
except ModuleNotFoundError:
    raise ConfigError("the page of a run needs matplotlib: pip install 'cp-ring[draw]'") from None

CERTIFICATE = "cp_ring_certificate.json"
_BLUE, _ORANGE, _INK = "#0072b2", "#d55e00", "#22272e"  # of the palette of Okabe and Ito
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22272e;
  max-width: 1100px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
section { overflow-x: auto } svg { min-width: 640px; max-width: 100%; height: auto }
table { border-collapse: collapse }
td, th { text-align: left; padding: .15em 1.2em .15em 0; vertical-align: top }
.none { color: #6b7280 }
"""


def write(run_dir: Path, path: Path) -> None:
    """Writes the page of a run. Raises `ConfigError` if `run_dir` holds no run."""
    path.write_text(page(run_dir))


def page(run_dir: Path) -> str:
    """The page as HTML."""
    facts = status(run_dir)
    steps = progress.read(run_dir)
    save = Path(facts["save"])
    sections: dict[str, Callable[[], str]] = {
        "state": lambda: _table([], [*lines(facts).items()]),
        "curves": lambda: _curves(run_dir, steps, save),
        "where the time goes": lambda: _times(steps),
        "plan": lambda: _plan(run_dir),
        "certificate and versions": lambda: _certificate(save),
    }
    body = "".join(
        f'<section id="{name.replace(" ", "-")}">'
        f"<h2>{name.capitalize()}</h2>{_section(make)}</section>"
        for name, make in sections.items()
    )
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(str(run_dir))}</title><style>{_STYLE}</style>"
        f"</head><body><h1>{escape(str(run_dir.resolve()))}</h1><p>as of {now}</p>{body}"
        "</body></html>\n"
    )


def _table(head: Sequence[str], entries: Sequence[Sequence[object]]) -> str:
    cells = "".join(f"<th>{escape(word)}</th>" for word in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in entry) + "</tr>"
        for entry in entries
    )
    return f"<table>{f'<tr>{cells}</tr>' if head else ''}{body}</table>"


def _section(make: Callable[[], str]) -> str:
    """A section, or what is wrong with the file that it is made from: any program may have written
    it, or a part of it.
    """
    try:
        return make()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return _none(f"cannot be read: {type(error).__name__}: {error}")


def _none(what: str) -> str:
    return f'<p class="none">{escape(what)}</p>'


def _curves(run_dir: Path, steps: list[dict[str, Any]], save: Path) -> str:
    """Loss, tokens per second, exposed communication and memory over time, with restarts and
    checkpoints.
    """
    timed = [step for step in steps if isinstance(step.get("time"), int | float)]
    if not timed:
        return _none("no step is logged yet")
    zero = timed[0]["time"]
    memory = [(step["time"], step["memory"] / 2**30) for step in timed if "memory" in step]
    sampled = [step for step in timed if progress.timings([step])]
    curves = {
        "loss": [
            (step["time"], step["lm loss"])
            for step in timed
            if isinstance(step.get("lm loss"), int | float)
        ],
        "tokens/s": [
            (step["time"], step["tokens per second"])
            for step in timed
            if "tokens per second" in step
        ],
        "exposed communication,\n% of attention": [
            (step["time"], 100 * step["timing"]["exposed_share"])
            for step in sampled
            if "exposed_share" in step["timing"]
        ],
        "memory of a rank, GiB": memory,
    }
    marks: list[tuple[float, dict[str, Any]]] = [
        (when, {"color": _ORANGE, "lw": 1, "ls": "--"}) for when in restarts(run_dir, timed)
    ]
    marks += [(when, {"color": "#999999", "lw": 0.6}) for when in _checkpoints(save)]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cp_ring"}):
        figure = Figure(figsize=(10.5, 8), layout="constrained")
        for axes, (name, points) in zip(
            figure.subplots(4, 1, sharex=True), curves.items(), strict=True
        ):
            axes.plot(
                [(when - zero) / 60 for when, _ in points],
                [value for _, value in points],
                color=_BLUE,
                lw=1.5,
                marker="." if len(points) < 60 else None,
            )
            axes.set_ylabel(name, fontsize=9)
            if not points:
                axes.set_yticks([])
                axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
            axes.spines[["top", "right"]].set_visible(False)
            for when, look in marks:
                axes.axvline((when - zero) / 60, **look)
        axes.set_xlabel("minutes since the first logged step; dashed: restarts, gray: checkpoints")
        return _svg(figure)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def restarts(run_dir: Path, steps: Sequence[dict[str, Any]]) -> list[float]:
    """When the job started again: Slurm's restarts, and logged steps that are no later than the one
    before them.
    """
    by_slurm = [
        float(event.time)
        for event in attempts.read(run_dir)
        if event.kind == "start" and event.restart > 0
    ]
    return by_slurm + [
        now["time"] for before, now in pairwise(steps) if now["step"] <= before["step"]
    ]


def _checkpoints(save: Path) -> Iterator[float]:
    for folder in save.glob("iter_*"):
        yield os.stat(folder).st_mtime


def _times(steps: list[dict[str, Any]]) -> str:
    """The newest sampled step, and the slowest ranks and links of the last ones."""
    sampled = progress.timings(steps)
    if not sampled:
        return _none("no step was sampled: give --cp-ring-timing fewer than the job has steps")
    last = sampled[-1]
    names = (
        "step",
        "attention_ms",
        "exposed_ms",
        "exposed_share",
        "balance_planned",
        "balance_timed",
        "plans_ms",
    )
    values = [(name.replace("_", " "), last.get(name, "")) for name in names]
    values += [(f"wire {name}, GB/s", rate) for name, rate in last.get("wire_gb_s", {}).items()]
    slow = []
    for each in sampled[-10:]:
        slow_rank = slow_link = ""
        if rank := each.get("slowest_rank"):
            slow_rank = (
                f"{rank['rank']} ({rank['host']}): {rank['slower'] - 1:+.0%}, in "
                f"{rank['share']:.0%} of the calls"
            )
        if link := each.get("slowest_link"):
            slow_link = f"{link['sender']} -> {link['receiver']}: {link['slower']:.1f} x"
        slow.append((each.get("step", ""), slow_rank, slow_link))
    hops = [
        (hop["direction"], hop["hop"], hop["compute_ms"], hop["wait_ms"])
        for hop in last.get("hops", ())
    ]
    return (
        _table([], values)
        + _table(("direction", "hop", "computing, ms", "waiting, ms"), hops)
        + _table(("step", "slowest rank", "slowest link"), slow)
    )


def _plan(run_dir: Path) -> str:
    """The picture of the plan of the first layer."""
    from cp_ring.tools.slurm import attention_plan

    try:
        job = configs.load(str(run_dir / "job.yaml"), [])
        if job.parallel.context_parallel_size == 1:
            return _none("context parallel size 1: no hops")
        from cp_ring.tools.cli.drawing import Look, draw

        with (
            tempfile.TemporaryDirectory() as folder,
            matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "plan"}),
        ):
            look = Look(attention_plan.sizes_of(job))
            draw(attention_plan.plan_of(job), f"{folder}/plan.svg", look)
            text = Path(f"{folder}/plan.svg").read_text()
        # Two pictures on a page must not share the identifiers of their parts.
        return re.sub(r'(\bid="|url\(#|href="#)', r"\1plan-", text[text.index("<svg") :])
    except (ValueError, KeyError, TypeError) as error:
        return _none(f"no picture: {error}")


def _certificate(save: Path) -> str:
    try:
        record = json.loads((save / CERTIFICATE).read_text())
    except (OSError, ValueError):
        return _none("no certificate beside the checkpoints")
    about = record["about"]
    table = probe_table(record)
    columns = [column.cells for column in table.columns]
    return (
        _table([], [*about["versions"].items(), ("date", about["date"])])
        + f"<p>{escape(closing_line(record))}</p>"
        + _table([str(column.header) for column in table.columns], [*zip(*columns, strict=True)])
    )
