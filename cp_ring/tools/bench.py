"""`cp-ring bench`: attention beside other packages, its accuracy, and the host's time in a hop.

The modules that measure are imported when a bench runs, so that help is quick.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from cp_ring.errors import ConfigError
from cp_ring.tools.terminal import AsJson, QuietCommand, QuietGroup, show_table

Result = dict[str, Any]
app = typer.Typer(cls=QuietGroup, no_args_is_help=True, help="Measure cp_ring on this machine.")

_PACKAGES = ("cp-ring", "torch", "numpy", "transformer-engine", "ring-attention-pytorch")
_DEVICES = ("cpu", "cuda")


def facts() -> dict[str, Any]:
    """Date, machine, load, and the versions of the installed packages that are measured."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"{_processor()}",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def _print(title: str, columns: Mapping[str, str], results: list[Result], as_json: bool) -> None:
    """Prints results, and where and when they were measured. columns: how each value is shown."""
    about = facts()
    if as_json:
        typer.echo(json.dumps({**about, "rows": results}))
        return
    lines = [[format(result[name], how) for name, how in columns.items()] for result in results]
    show_table(title, "", [*columns], lines)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    typer.echo(f"{about['date']}; {about['machine']}, load {about['load']}; {versions}")


def _check_device(device: str) -> None:
    import torch

    if device not in _DEVICES:
        raise ConfigError(f"--device {device}: unknown; known are {', '.join(_DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device; --device cpu needs none")


def _positive(text: str) -> Any:
    return typer.Option(min=1, help=text)


Device = Annotated[str, typer.Option(help="cpu or cuda.")]


@app.command(cls=QuietCommand)
def attention(
    seq_length: Annotated[int, _positive("Tokens of the whole sequence.")] = 8192,
    cp: Annotated[int, _positive("Ranks: a thread each on the CPU, or a GPU each.")] = 2,
    heads: Annotated[int, _positive("Heads of queries, keys and values.")] = 8,
    head_dim: Annotated[int, _positive("Size of a head.")] = 64,
    device: Device = "cpu",
    repeats: Annotated[int, _positive("Rounds; each contestant runs once per round.")] = 5,
    only: Annotated[
        list[str] | None, typer.Option(help="A contestant; repeatable. Default: all installed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time causal attention, forward and backward. Beside one kernel call on one rank, and beside
    packages that are installed: ring-attention-pytorch on the CPU, TransformerEngine on CUDA.
    """
    import torch

    from cp_ring.tools.bench_attention import Contest, installed, run

    _check_device(device)
    if device == "cuda" and torch.cuda.device_count() < cp:
        gpus = torch.cuda.device_count()
        raise ConfigError(f"--cp {cp} ranks need a CUDA device each, but there are {gpus}")
    if seq_length % (2 * cp):
        raise ConfigError(f"--seq-length {seq_length} does not divide by 2 * --cp {cp}")
    known = installed(device)
    for name in only or ():
        if name not in known:
            raise ConfigError(f"--only {name}: installed for {device} are {', '.join(known)}")
    names = tuple(only or known)
    results = run(Contest(seq_length, cp, heads, head_dim, device, names, repeats))
    columns = {"name": "", **dict.fromkeys(("median_s", "min_s", "max_s"), ".3f")}
    columns |= {"error": ".1e"}
    title = f"causal, {seq_length} x {heads} x {head_dim}, {cp} ranks"
    _print(title, columns, results, as_json)


@app.command(cls=QuietCommand)
def host(
    repeats: Annotated[int, _positive("Calls of each measurement; the least time counts.")] = 50,
    against: Annotated[
        Path | None, typer.Option(help="A checkout of another version, measured too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time what the host does in a hop. Beyond the attention library and the messages."""
    from cp_ring.tools import bench_host

    if against is not None and not (against / "cp_ring" / "__init__.py").is_file():
        raise ConfigError(f"--against {against}: there is no cp_ring/__init__.py in it")
    results = bench_host.run(repeats, against)
    columns = {"pass": "", "cp": "", "hop_us": ".0f", "cp_ring": ""}
    _print("causal, one source a hop, 4 heads, CPU", columns, results, as_json)


@app.command(cls=QuietCommand)
def accuracy(
    seq_length: Annotated[int, _positive("Tokens of the whole sequence.")] = 2048,
    heads: Annotated[int, _positive("Query heads.")] = 2,
    kv_heads: Annotated[int, _positive("Key/value heads.")] = 1,
    head_dim: Annotated[int, _positive("Size of a head.")] = 64,
    cp: Annotated[
        list[int] | None, typer.Option(help="Ranks; repeatable. Default: 1, 2, 4, 8.", min=1)
    ] = None,
    kernel: Annotated[str, typer.Option(help="As --cp-ring-kernel.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Compare errors with those of one kernel call. Both against float64, on the whole sequence."""
    from cp_ring.kernels import REGISTRY
    from cp_ring.tools.bench_accuracy import PARTS, AccuracyCases, run

    for flag, value, known in (
        ("--kernel", kernel, ("auto", *REGISTRY)),
        ("--dtype", dtype, ("float32", "bfloat16", "float16")),
    ):
        if value not in known:
            raise ConfigError(f"{flag} {value}: unknown; known are {', '.join(known)}")
    _check_device(device)
    sizes = seq_length, heads, kv_heads, head_dim
    results = run(AccuracyCases(*sizes, kernel, dtype, cp or (1, 2, 4, 8), device=device))
    columns = {"mask": "", "cp": "", **dict.fromkeys(PARTS, ".2f")}
    _print(f"error of the ring / of one call, {kernel}, {dtype}", columns, results, as_json)
