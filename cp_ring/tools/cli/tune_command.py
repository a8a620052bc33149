"""`cp-ring tune`: the fastest ways to run a job on so many GPUs, as a table, as JSON and as a
configuration.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from functools import partial
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
from cp_ring.tools import lengths as samples
from cp_ring.tools.cli.option_models import JOB, WRITTEN, argument, option, parse_tokens
from cp_ring.tools.cli.terminal import emit
from cp_ring.tools.job import JobConfig, load
from cp_ring.tools.tune_job import Request, TuneResult, packs_documents, tune

DRAWN = 32
"""Batch rows of documents that are drawn to see how uneven they are."""

_UNITS = {"": 1e9, "gb": 1e9, "gib": 2**30, "tb": 1e12, "mb": 1e6}
_search, _machine, _output = (
    partial(option, panel=name) for name in ("Search", "Machines", "Output")
)


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The options of `cp-ring tune`."""

    config: str | None = argument(JOB, metavar="JOB")
    gpus: int | None = _machine(None, "GPUs of the job.", min=1)
    ranks_per_node: int = _machine(8, "GPUs of a node.", min=1)
    rates: str = _machine(
        next(iter(NAMED)),
        f"{', '.join(NAMED)}, or a JSON file of rates.",
        metavar="NAME|FILE",
    )
    memory: str = _machine("80GB", "Memory of a GPU.", metavar="SIZE")
    seq_length: int | None = _search(
        None,
        "Tokens of a batch row, if not the configuration's.",
        parser=parse_tokens,
        metavar="TOKENS",
    )
    lengths: str | None = _search(
        None,
        "Batch rows of documents with lengths like these: a file, lognormal:MEAN,SIGMA, or "
        "preset:sft.",
        metavar="SPEC",
    )
    seed: int = _search(0, "Seed of the drawn documents.", min=0)
    tp: int | None = _search(None, "Tensor parallel size; searched.")
    cp: int | None = _search(None, "Context parallel size; searched.")
    pp: int | None = _search(None, "Pipeline parallel size; searched.")
    micro_batch: int | None = _search(None, "Batch rows of a microbatch; searched.", min=1)
    lossy: bool = _search(False, "Try int8 and fp8 keys too, which cost accuracy.", "--lossy")
    set_: list[str] | None = option(
        None, "Override a key of the configuration. Repeatable.", "--set", metavar="A.B=C"
    )
    write: str | None = _output(None, "Write the best configuration.", **WRITTEN)
    as_json: bool = _output(False, "Print JSON instead of tables.", "--json")


def run_tune(options: TuneOptions) -> None:
    """Find the fastest ways to run a job on so many GPUs, by the cost model. All times are
    predicted. Needs no GPU.
    """
    if options.config is None or options.gpus is None:
        raise PlanError(
            "cp-ring tune needs a configuration and --gpus, as in: cp-ring tune llama3-8b-128k "
            "--gpus 64"
        )
    gpus, ranks_per_node = options.gpus, options.ranks_per_node
    if gpus > ranks_per_node and gpus % ranks_per_node:
        raise PlanError(f"--gpus {gpus} is not a multiple of --ranks-per-node {ranks_per_node}")
    job = load(options.config, options.set_ or [])
    documents, origin = _documents(job, options.lengths, options.seq_length, options.seed)
    request = Request(
        gpus=gpus,
        ranks_per_node=min(ranks_per_node, gpus),
        rates=named_or_read(options.rates),
        memory=parse_memory(options.memory),
        seq_length=options.seq_length,
        documents=documents,
        of_documents=origin,
        given=Given(options.tp, options.cp, options.pp, options.micro_batch),
        lossy=options.lossy,
    )
    result = tune(job, request)
    title = f"{options.config} on {gpus} GPUs"
    if options.write:
        _write(options.write, result.best[0][1], options.config)
    emit(
        facts(result),
        options.as_json,
        lambda: _print(result, f"{title}, rates {options.rates}"),
    )
    if options.write:
        typer.echo(f"wrote {options.write}", err=options.as_json)


def parse_memory(size: str) -> float:
    """Bytes of 80GB, 80GiB or 80, which are GB. Raises `PlanError` that names the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", size.strip().lower())
    if not match or match[2] not in _UNITS or not float(match[1]):
        raise PlanError(f"--memory {size}: it must be a size above 0, such as 80GB or 80GiB")
    return float(match[1]) * _UNITS[match[2]]


def _documents(
    job: JobConfig,
    spec: str | None,
    seq_length: int | None,
    seed: int,
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
    origin = chosen
    if not spec:
        origin += " (the configuration packs documents, and --lengths is not given)"
    packed = f"{origin}, packed into {n:,} tokens"
    if chosen.partition(":")[0] in ("preset", "lognormal"):
        return [samples.lengths(chosen, n, seed + draw) for draw in range(DRAWN)], packed
    known = samples.lengths(chosen, None, seed)
    rng = np.random.default_rng(seed)
    count = math.ceil(4 * n / known.mean()) + 64
    drawn = [np.cumsum(rng.choice(known, count)) for _ in range(DRAWN)]
    return [np.diff([0, *ends[ends < n], n]) for ends in drawn], f"drawn from {packed}"


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
            cp: {"least_bytes": way} if isinstance(way, float) else _way(result, way)
            for cp, way in result.by_cp.items()
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
    columns = [_column(result, way) for way in ways]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    seconds, memory = [way.seconds for way in ways], [way.memory for way in ways]
    for header, amounts, unit in (("step, s", seconds, 1.0), ("memory, GB", memory, 1e9)):
        table.add_section()
        total = (f"{sum(items.values()) / unit:,.2f}" for items in amounts)
        table.add_row(header, *total, style="bold")
        for name in dict.fromkeys(name for items in amounts for name in items):
            cells = (f"{items[name] / unit:,.2f}" if items.get(name) else "" for items in amounts)
            table.add_row(f"  {name}", *cells)
    console.print(table)
    lines = [f"Why {ways[0].sizes.name}:"]
    for name, reason in result.rejected[:3]:
        lines.append(f"- Megatron rejects {name}, which is faster: {reason}")
    lines += [f"- {line}" for line in result.reasons]
    lines += ["Assumed:", *(f"- {line}" for line in result.assumptions)]
    for line in lines:
        console.print(line, soft_wrap=True)


def _column(result: TuneResult, way: Tuned) -> dict[str, str]:
    """What the table says of a way, by name."""
    sizes, attention = way.sizes, way.attention
    return {
        **{name: str(getattr(sizes, name)) for name in ("tp", "cp", "pp", "dp")},
        "attention": attention.shape.name,
        "wire": attention.wire,
        "layout": attention.layout,
        **{f"{each.layers.kind} layers": each.way for each in way.recurrent},
        "micro batch": str(way.micro_batch),
        "recompute": way.recompute,
        "tokens/s/GPU": f"{_speed(result, way):,.0f}",
        "exposed, s": f"{way.exposed:,.3f}",
    }
