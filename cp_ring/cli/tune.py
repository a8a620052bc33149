"""`cp-ring tune`: the fastest ways to run a job on so many GPUs, as a table, as JSON, as a configuration and as a picture."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cp_ring.bench import samples
from cp_ring.cli.options import parse_tokens
from cp_ring.errors import ConfigError, PlanError
from cp_ring.job.config import JobConfig, load
from cp_ring.job.tune import Request, TuneResult, packs_documents, tune
from cp_ring.plan.ranges import Ints
from cp_ring.plan.rates import NAMED, named_or_read
from cp_ring.plan.tune import Given, Tuned

DRAWN = 32
"""Batch rows of documents that are drawn to see how uneven they are."""

_UNITS = {"": 1e9, "gb": 1e9, "gib": 2**30, "tb": 1e12, "mb": 1e6}
_SEARCH, _MACHINES, _OUTPUT, _CHECK = "Search", "Machines", "Output", "Check"
_TOKENS: dict[str, Any] = {"parser": parse_tokens, "metavar": "TOKENS"}


def tune_command(
    config: Annotated[
        str | None, typer.Argument(help="A YAML file, or the name of a packaged one (cp-ring train --list).")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of the job.", rich_help_panel=_MACHINES)] = None,
    ranks_per_node: Annotated[int, typer.Option(help="GPUs of a node.", rich_help_panel=_MACHINES)] = 8,
    rates: Annotated[
        str,
        typer.Option(metavar="NAME|FILE", help=f"{', '.join(NAMED)}, or a file that `cp-ring bench rates --json` or preflight "
                     "has written.", rich_help_panel=_MACHINES),
    ] = next(iter(NAMED)),
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of a GPU.", rich_help_panel=_MACHINES)] = "80GB",
    seq_length: Annotated[
        int | None, typer.Option(help="Tokens of a batch row, if not the configuration's.", rich_help_panel=_SEARCH, **_TOKENS)
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Batch rows of documents with lengths like these: a file, lognormal:MEAN,SIGMA, or "
                     f"preset:NAME of {', '.join(samples.PRESETS)}.", rich_help_panel=_SEARCH),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn documents.", rich_help_panel=_SEARCH)] = 0,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel size; searched.", rich_help_panel=_SEARCH)] = None,
    cp: Annotated[int | None, typer.Option(help="Context parallel size; searched.", rich_help_panel=_SEARCH)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline parallel size; searched.", rich_help_panel=_SEARCH)] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Batch rows of a microbatch; searched.", rich_help_panel=_SEARCH)
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Try int8 and fp8 keys too, which cost accuracy.", rich_help_panel=_SEARCH)
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a key of the configuration. Repeatable.")
    ] = None,
    write: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write the best configuration.", rich_help_panel=_OUTPUT)
    ] = None,
    draw: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Draw time against context parallel size, to a .png, .svg or .pdf file.",
                     rich_help_panel=_OUTPUT),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.", rich_help_panel=_OUTPUT)] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare predicted with measured times of a small model on 4 CPU ranks of this machine.",
                     rich_help_panel=_CHECK),
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of --check.", rich_help_panel=_CHECK)] = 7,
    cpu_time: Annotated[
        bool,
        typer.Option("--cpu-time", help="Compare CPU time in --check, which other work on the machine hardly changes.",
                     rich_help_panel=_CHECK),
    ] = False,
) -> None:  # fmt: skip
    """Find the fastest ways to run a job on so many GPUs, by the cost model. All times are predicted. Needs no GPU."""
    if check:
        from cp_ring.cli.tune_check import check_command

        check_command(repeats, as_json, cpu_time)
        return
    if config is None or gpus is None:
        raise PlanError("cp-ring tune needs a configuration and --gpus, as in: cp-ring tune llama3-8b-128k --gpus 64")
    _check_machines(gpus, ranks_per_node)
    if draw:
        from cp_ring.cli.drawing import check_ending

        check_ending(draw)
    job = load(config, set_ or [])
    documents, origin = _documents(job, lengths, seq_length, seed)
    request = Request(
        gpus=gpus,
        ranks_per_node=min(ranks_per_node, gpus),
        rates=named_or_read(rates),
        memory=parse_memory(memory),
        seq_length=seq_length,
        documents=documents,
        of_documents=origin,
        given=Given(tp, cp, pp, micro_batch),
        lossy=lossy,
    )
    result = tune(job, request)
    _tell(result, config, gpus, rates, write, draw, as_json)


def _check_machines(gpus: int, ranks_per_node: int) -> None:
    """Raises `PlanError` unless the GPUs are some on one node, or whole nodes."""
    for option, value in (("--gpus", gpus), ("--ranks-per-node", ranks_per_node)):
        if value < 1:
            raise PlanError(f"{option} {value}: it must be at least 1")
    if gpus > ranks_per_node and gpus % ranks_per_node:
        raise PlanError(f"--gpus {gpus}: they are no whole number of nodes of --ranks-per-node {ranks_per_node}")


def _tell(
    result: TuneResult, config: str, gpus: int, rates: str, write: str | None, draw: str | None, as_json: bool
) -> None:  # fmt: skip
    """Writes, prints and draws what was found, as asked."""
    if write:
        _write(write, result.best[0][1], config)
    if as_json:
        typer.echo(json.dumps(facts(result)))
    else:
        _print(result, f"{config} on {gpus} GPUs, rates {rates}")
    if draw:
        from cp_ring.cli.tune_drawing import draw_times

        draw_times(result, draw, f"{config} on {gpus} GPUs")
    for path in filter(None, (write, draw)):
        typer.echo(f"wrote {path}", err=as_json)


def parse_memory(size: str) -> float:
    """Bytes of 80GB, 80GiB or 80, which are GB. Raises `PlanError` that names the option."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", size.strip().lower())
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise PlanError(f"--memory {size}: it must be a size above 0, such as 80GB or 80GiB")
    return float(found[1]) * _UNITS[found[2]]


def _documents(job: JobConfig, spec: str | None, seq_length: int | None, seed: int) -> tuple[list[Ints], str]:
    """Lengths of the documents of some batch rows, and where they come from; none for a job without documents."""
    if spec is None and not packs_documents(job):
        return [], ""
    chosen = spec or "preset:sft"
    n = seq_length or job.megatron.get("seq_length")
    if not isinstance(n, int) or n < 1:
        raise ConfigError(f"megatron.seq_length {n!r}: it must be the number of tokens of a batch row")
    origin = chosen if spec else f"{chosen} (the configuration packs documents, and --lengths is not given)"
    if chosen.partition(":")[0] in ("preset", "lognormal"):
        return [samples.lengths(chosen, n, seed + draw) for draw in range(DRAWN)], f"{origin}, packed into {n:,} tokens"
    known, rng = samples.lengths(chosen, None, seed), np.random.default_rng(seed)
    drawn = [np.cumsum(rng.choice(known, math.ceil(4 * n / known.mean()) + 64)) for _ in range(DRAWN)]
    return [np.diff([0, *ends[ends < n], n]) for ends in drawn], f"drawn from {origin}, packed into {n:,} tokens"


def _write(path: str, job: JobConfig, source: str) -> None:
    settings = job.model_dump(mode="json", exclude_defaults=True)
    order = ("megatron", "data", "parallel", "cp_ring", "launch")
    comment = f"# Made by cp-ring tune from {source}. The times that chose it are predicted, not measured.\n"
    try:
        Path(path).write_text(comment + yaml.safe_dump({key: settings[key] for key in order if key in settings}, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--write {path}: cannot write: {error.strerror}") from None


def facts(result: TuneResult) -> dict[str, Any]:
    """The result, ready for JSON. Times are predicted seconds, sizes are bytes."""
    return {
        "best": [_way(result, way) for way, _ in result.best],
        "by_cp": {
            cp: {"least_bytes": found} if isinstance(found, float) else _way(result, found) for cp, found in result.by_cp.items()
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
        "heads": attention.shape.heads,
        "schedule": list(attention.schedule),
        "wire": attention.wire,
        "layout": attention.layout,
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
    table = Table(title=f"{title}: predicted, not measured", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", min_width=26)
    for number in range(1, len(ways) + 1):
        table.add_column(str(number), justify="right")
    lines = {
        **{name: [str(getattr(way.sizes, name)) for way in ways] for name in ("tp", "cp", "pp", "dp")},
        "attention": [way.attention.shape.name for way in ways],
        "wire": [way.attention.wire for way in ways],
        "layout": [way.attention.layout for way in ways],
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
        table.add_row(header, *(f"{sum(items.values()) / unit:,.2f}" for items in amounts), style="bold")
        for name in dict.fromkeys(name for items in amounts for name in items):
            table.add_row(f"  {name}", *(f"{items[name] / unit:,.2f}" if items.get(name) else "" for items in amounts))
    console.print(table)
    console.print(f"Why {ways[0].sizes.name}:")
    for name, reason in result.rejected[:3]:
        console.print(f"- Megatron rejects {name}, which is faster: {reason}", soft_wrap=True)
    for line in result.reasons:
        console.print(f"- {line}", soft_wrap=True)
    console.print("Assumed:")
    for line in result.assumptions:
        console.print(f"- {line}", soft_wrap=True)
