"""`cp-ring tune`: the fastest ways to run a job on so many GPUs, as a table, as JSON, as a
configuration and as a picture; and how well its model holds (--check).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.costs.search import Given, Tuned
from cp_ring.plan.ranges import Ints
from cp_ring.plan.sizes.device_rates import NAMED, named_or_read
from cp_ring.tools.bench import samples
from cp_ring.tools.cli.option_models import JOB, WRITTEN, argument, option, parse_tokens
from cp_ring.tools.job.job_config import JobConfig, load
from cp_ring.tools.job.tune_job import Request, TuneResult, packs_documents, tune

DRAWN = 32
"""Batch rows of documents that are drawn to see how uneven they are."""

_UNITS = {"": 1e9, "gb": 1e9, "gib": 2**30, "tb": 1e12, "mb": 1e6}
_SEARCH, _MACHINES, _OUTPUT, _CHECK = (
    {"rich_help_panel": name} for name in ("Search", "Machines", "Output", "Check")
)
_TOKENS: dict[str, Any] = {"parser": parse_tokens, "metavar": "TOKENS"}


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The options of `cp-ring tune`."""

    config: str | None = argument(JOB, metavar="JOB")
    gpus: int | None = option(None, "GPUs of the job.", min=1, **_MACHINES)
    ranks_per_node: int = option(8, "GPUs of a node.", min=1, **_MACHINES)
    rates: str = option(
        next(iter(NAMED)),
        f"{', '.join(NAMED)}, or a file that `cp-ring bench rates --json` or preflight has "
        "written.",
        metavar="NAME|FILE",
        **_MACHINES,
    )
    memory: str = option("80GB", "Memory of a GPU.", metavar="SIZE", **_MACHINES)
    seq_length: int | None = option(
        None, "Tokens of a batch row, if not the configuration's.", **_TOKENS, **_SEARCH
    )
    lengths: str | None = option(
        None,
        "Batch rows of documents with lengths like these: a file, lognormal:MEAN,SIGMA, or "
        f"preset:NAME of {', '.join(samples.PRESETS)}.",
        metavar="SPEC",
        **_SEARCH,
    )
    seed: int = option(0, "Seed of the drawn documents.", min=0, **_SEARCH)
    tp: int | None = option(None, "Tensor parallel size; searched.", **_SEARCH)
    cp: int | None = option(None, "Context parallel size; searched.", **_SEARCH)
    pp: int | None = option(None, "Pipeline parallel size; searched.", **_SEARCH)
    micro_batch: int | None = option(
        None, "Batch rows of a microbatch; searched.", min=1, **_SEARCH
    )
    lossy: bool = option(
        False, "Try int8 and fp8 keys too, which cost accuracy.", "--lossy", **_SEARCH
    )
    set_: list[str] | None = option(
        None, "Override a key of the configuration. Repeatable.", "--set", metavar="A.B=C"
    )
    write: str | None = option(None, "Write the best configuration.", **WRITTEN, **_OUTPUT)
    draw: str | None = option(
        None,
        "Draw time against context parallel size, to a .png, .svg or .pdf file.",
        **WRITTEN,
        **_OUTPUT,
    )
    as_json: bool = option(False, "Print JSON instead of tables.", "--json", **_OUTPUT)
    check: bool = option(
        False,
        "Compare predicted with measured times of a small model on 4 CPU ranks of this machine.",
        "--check",
        **_CHECK,
    )
    repeats: int = option(7, "Rounds of --check.", min=1, **_CHECK)
    cpu_time: bool = option(
        False,
        "Compare CPU time in --check, which other work on the machine hardly changes.",
        "--cpu-time",
        **_CHECK,
    )


def run_tune(options: TuneOptions) -> None:
    """Find the fastest ways to run a job on so many GPUs, by the cost model. All times are
    predicted. Needs no GPU.
    """
    if options.check:
        check_command(options.repeats, options.as_json, options.cpu_time)
        return
    if options.config is None or options.gpus is None:
        raise PlanError(
            "cp-ring tune needs a configuration and --gpus, as in: cp-ring tune llama3-8b-128k "
            "--gpus 64"
        )
    _check_machines(options.gpus, options.ranks_per_node)
    if options.draw:
        from cp_ring.tools.cli.drawing import check_ending

        check_ending(options.draw)
    job = load(options.config, options.set_ or [])
    documents, origin = _documents(job, options.lengths, options.seq_length, options.seed)
    request = Request(
        gpus=options.gpus,
        ranks_per_node=min(options.ranks_per_node, options.gpus),
        rates=named_or_read(options.rates),
        memory=parse_memory(options.memory),
        seq_length=options.seq_length,
        documents=documents,
        of_documents=origin,
        given=Given(options.tp, options.cp, options.pp, options.micro_batch),
        lossy=options.lossy,
    )
    _tell(tune(job, request), options)


def _check_machines(gpus: int, ranks_per_node: int) -> None:
    """Raises `PlanError` unless the GPUs are some on one node, or whole nodes."""
    if gpus > ranks_per_node and gpus % ranks_per_node:
        raise PlanError(f"--gpus {gpus} is not a multiple of --ranks-per-node {ranks_per_node}")


def _tell(result: TuneResult, options: TuneOptions) -> None:
    """Writes, prints and draws what was found, as asked."""
    config = str(options.config)
    title = f"{options.config} on {options.gpus} GPUs"
    if options.write:
        _write(options.write, result.best[0][1], config)
    if options.as_json:
        typer.echo(json.dumps(facts(result)))
    else:
        _print(result, f"{title}, rates {options.rates}")
    if options.draw:
        from cp_ring.tools.cli.drawing import draw_times

        draw_times(result, options.draw, title)
    for path in filter(None, (options.write, options.draw)):
        typer.echo(f"wrote {path}", err=options.as_json)


def parse_memory(size: str) -> float:
    """Bytes of 80GB, 80GiB or 80, which are GB. Raises `PlanError` that names the option."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", size.strip().lower())
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise PlanError(f"--memory {size}: it must be a size above 0, such as 80GB or 80GiB")
    return float(found[1]) * _UNITS[found[2]]


def _documents(
    job: JobConfig, spec: str | None, seq_length: int | None, seed: int
) -> tuple[list[Ints], str]:
    """Lengths of the documents of some batch rows, and where they come from; none for a job without
    documents.
    """
    if spec is None and not packs_documents(job):
        return [], ""
    chosen = spec or "preset:sft"
    n = seq_length or job.megatron.get("seq_length")
    if not isinstance(n, int) or n < 1:
        raise ConfigError(
            f"megatron.seq_length {n!r}: it must be the number of tokens of a batch row"
        )
    origin = (
        chosen
        if spec
        else f"{chosen} (the configuration packs documents, and --lengths is not given)"
    )
    if chosen.partition(":")[0] in ("preset", "lognormal"):
        return [
            samples.lengths(chosen, n, seed + draw) for draw in range(DRAWN)
        ], f"{origin}, packed into {n:,} tokens"
    known = samples.lengths(chosen, None, seed)
    rng = np.random.default_rng(seed)
    drawn = [
        np.cumsum(rng.choice(known, math.ceil(4 * n / known.mean()) + 64)) for _ in range(DRAWN)
    ]
    return [
        np.diff([0, *ends[ends < n], n]) for ends in drawn
    ], f"drawn from {origin}, packed into {n:,} tokens"


def _write(path: str, job: JobConfig, source: str) -> None:
    settings = job.model_dump(mode="json", exclude_defaults=True)
    order = ("megatron", "data", "parallel", "cp_ring", "launch")
    comment = (
        f"# Made by cp-ring tune from {source}. The times that chose it are predicted, not "
        "measured.\n"
    )
    chosen = {key: settings[key] for key in order if key in settings}
    Path(path).write_text(comment + yaml.safe_dump(chosen, sort_keys=False))


def facts(result: TuneResult) -> dict[str, Any]:
    """The result, ready for JSON. Times are predicted seconds, sizes are bytes."""
    return {
        "best": [_way(result, way) for way, _ in result.best],
        "by_cp": {
            cp: {"least_bytes": found} if isinstance(found, float) else _way(result, found)
            for cp, found in result.by_cp.items()
        },
        "reasons": result.reasons,
        "rejected": [{"sizes": sizes, "reason": reason} for sizes, reason in result.rejected],
        "assumptions": result.assumptions,
    }


def _speed(result: TuneResult, way: Tuned) -> float:
    """Tokens per second and GPU."""
    return result.setup.global_batch * result.setup.seq_length / way.step / result.setup.gpus


def _way(result: TuneResult, way: Tuned) -> dict[str, Any]:
    attention = way.attention
    return {
        **way.sizes._asdict(),
        "micro_batch": way.micro_batch,
        "recompute": way.recompute,
        "route": attention.shape.route,
        "heads": attention.shape.ulysses,
        "schedule": list(attention.schedule),
        "wire": attention.wire,
        "layout": attention.layout,
        "recurrent": {
            x.layers.kind: {"layers": x.layers.count, "way": x.way, **asdict(x.cost)}
            for x in way.recurrent
        },
        "step_s": way.step,
        "tokens_per_s_per_gpu": _speed(result, way),
        "exposed_s": way.exposed,
        "seconds": way.seconds,
        "bytes": way.bytes,
        "memory": way.memory,
    }


def _print(result: TuneResult, title: str) -> None:
    console = Console()
    ways = [way for way, _ in result.best]
    table = Table(
        title=f"{title}: predicted, not measured",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("", min_width=26)
    for number in range(1, len(ways) + 1):
        table.add_column(str(number), justify="right")
    lines = {
        **{
            name: [str(getattr(way.sizes, name)) for way in ways]
            for name in ("tp", "cp", "pp", "dp")
        },
        "attention": [way.attention.shape.name for way in ways],
        "wire": [way.attention.wire for way in ways],
        "layout": [way.attention.layout for way in ways],
        **{
            f"{x.layers.kind} layers": [way.recurrent[i].way for way in ways]
            for i, x in enumerate(ways[0].recurrent)
        },
        "micro batch": [str(way.micro_batch) for way in ways],
        "recompute": [way.recompute for way in ways],
        "tokens/s/GPU": [f"{_speed(result, way):,.0f}" for way in ways],
        "exposed, s": [f"{way.exposed:,.3f}" for way in ways],
    }
    for name, cells in lines.items():
        table.add_row(name, *cells)
    seconds, memory = [way.seconds for way in ways], [way.memory for way in ways]
    for header, amounts, unit in (("step, s", seconds, 1.0), ("memory, GB", memory, 1e9)):
        table.add_section()
        table.add_row(
            header, *(f"{sum(items.values()) / unit:,.2f}" for items in amounts), style="bold"
        )
        for name in dict.fromkeys(name for items in amounts for name in items):
            table.add_row(
                f"  {name}",
                *(f"{items[name] / unit:,.2f}" if items.get(name) else "" for items in amounts),
            )
    console.print(table)
    console.print(f"Why {ways[0].sizes.name}:")
    for name, reason in result.rejected[:3]:
        console.print(f"- Megatron rejects {name}, which is faster: {reason}", soft_wrap=True)
    for line in result.reasons:
        console.print(f"- {line}", soft_wrap=True)
    console.print("Assumed:")
    for line in result.assumptions:
        console.print(f"- {line}", soft_wrap=True)


SPEARMAN, ERROR = 0.8, 0.25
"""What the model promises on an idle machine."""


def check_command(repeats: int, as_json: bool, cpu: bool) -> None:
    """Prints the comparison. Exit code 1 where the model does not hold what it promises."""
    from cp_ring.tools.bench.machine import facts
    from cp_ring.tools.bench.tune_check import RANKS, run

    result = run(repeats, cpu=cpu)
    good = result.spearman >= SPEARMAN and result.error < ERROR
    if as_json:
        typer.echo(json.dumps({**facts(), **asdict(result), "holds": good}))
        raise typer.Exit(0 if good else 1)
    console = Console()
    clock = "CPU time of a rank" if cpu else "time"
    table = Table(
        title=f"a small model on {RANKS} ranks, {clock} in ms: a step, and attention in it"
    )
    table.add_column("shape", no_wrap=True)
    for name in ("step", "predicted", "attention", "predicted", "error"):
        table.add_column(name, justify="right")
    for one in sorted(result.times, key=lambda one: float(one["step_s"])):
        columns = ("step_s", "predicted_step_s", "attention_s", "predicted_attention_s")
        error = one["predicted_attention_s"] / one["attention_s"] - 1
        table.add_row(
            one["name"], *(f"{1e3 * one[name]:,.0f}" for name in columns), f"{error:+.0%}"
        )
    console.print(table)
    turns = (
        "; they take turns, so messages hide behind nothing" if cpu or result.cores < RANKS else ""
    )
    rates = result.rates
    console.print(
        f"{result.cores} cores for {RANKS} ranks{turns}. Measured while all ranks work: "
        f"{rates.flops / 1e9:.3g} GFLOP/s in attention, {rates.flops * rates.products / 1e9:.3g} "
        f"in matrix products, {rates.inside / 1e9:.3g} GB/s a link, {rates.memory / 1e9:.3g} GB/s "
        f"in memory, {rates.call * 1e6:,.0f} us a call."
    )
    console.print(
        f"Rank correlation of steps {result.spearman:.2f} (at least {SPEARMAN}), median error of "
        f"attention {result.error:.0%} (below {ERROR:.0%}): "
        f"{'it holds' if good else 'IT DOES NOT HOLD'}",
        soft_wrap=True,
    )
    raise typer.Exit(0 if good else 1)
