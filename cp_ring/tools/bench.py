"""`cp-ring bench`: attention beside other packages, and the host's time in a hop.

Attention is measured on GPUs where there are any. The modules that measure are
imported when a bench runs, so that help is quick.
"""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from typing import Annotated, Any

import typer

from cp_ring.errors import ConfigError
from cp_ring.tools.terminal import AsJson, emit, show_table

app = typer.Typer(no_args_is_help=True, help="Measure cp_ring on this machine.")

_PACKAGES = ("cp-ring", "torch", "transformer-engine", "ring-attention-pytorch")


def facts() -> dict[str, Any]:
    """Return date, machine, load, and the versions of the installed packages that are measured."""
    installed = {each.name.lower(): each.version for each in metadata.distributions()}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 2),
        "versions": {name: installed[name] for name in _PACKAGES if name in installed},
    }


def _report(title: str, results: list[dict[str, Any]], as_json: bool) -> None:
    """Print results, and where and when they were measured."""
    about = facts()

    def show() -> None:
        show_table(title, results[0], (row.values() for row in results))
        versions = ", ".join(map(" ".join, about["versions"].items()))
        typer.echo(f"{about['date']}; {about['machine']}, load {about['load']}; {versions}")

    emit({**about, "rows": results}, as_json, show)


def _positive(text: str) -> Any:
    return typer.Option(min=1, metavar="N", help=text)


Tokens = Annotated[int, _positive("Tokens of the whole sequence.")]


@app.command()
def attention(
    seq_length: Tokens = 8192,
    cp: Annotated[int, _positive("Ranks: a thread each on the CPU, or a GPU each.")] = 2,
    heads: Annotated[int, _positive("Heads of queries, keys and values.")] = 8,
    head_dim: Annotated[int, _positive("Size of a head.")] = 64,
    repeats: Annotated[int, _positive("Rounds; each contestant runs once per round.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Time causal attention, forward and backward. One kernel call on one rank is timed beside it,
    and the packages that are installed: ring-attention-pytorch on the CPU, TransformerEngine on
    GPUs.
    """
    import torch

    from cp_ring.tools.bench_attention import Contest, run

    gpus = torch.cuda.device_count()
    device = "cuda" if gpus else "cpu"
    if gpus and gpus < cp:
        raise ConfigError(
            f"--cp {cp}: there are {gpus} GPUs; CUDA_VISIBLE_DEVICES= measures on the CPU"
        )
    if seq_length % (2 * cp):
        raise ConfigError(f"--seq-length {seq_length}: give a multiple of 2 * --cp = {2 * cp}")
    results = run(Contest(seq_length, cp, heads, head_dim, device, repeats))
    _report(f"causal, {seq_length} x {heads} x {head_dim}, {cp} ranks, {device}", results, as_json)


@app.command()
def host(
    repeats: Annotated[int, _positive("Calls of each measurement; the least time counts.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Time what the host does in a hop. The attention library and the messages do not count."""
    from cp_ring.tools.bench_host import measure

    _report("causal, one source a hop, 4 heads, CPU", measure(repeats), as_json)
