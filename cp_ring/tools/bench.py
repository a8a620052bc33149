"""`cp-ring bench`: attention beside other packages, its accuracy, and the host's time in a hop.

The modules that measure are imported when a bench runs, so that help is quick.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from cp_ring.errors import ConfigError
from cp_ring.tools.terminal import AsJson, QuietCommand, QuietGroup

Result = dict[str, Any]
Columns = Mapping[str, Callable[[Result], str]]
"""What each column shows of a result."""

app = typer.Typer(cls=QuietGroup, no_args_is_help=True, help="Measure cp_ring on this machine.")

_PACKAGES = ("cp-ring", "torch", "numpy", "transformer-engine", "ring-attention-pytorch")
_DTYPES = ("float32", "bfloat16", "float16")


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


def _print(title: str, columns: Columns, results: list[Result], as_json: bool) -> None:
    """Prints results, and where and when they were measured. A result that could not be measured
    has the reason in `rejected`.
    """
    about = facts()
    if as_json:
        typer.echo(json.dumps({**about, "rows": results}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title)
    for result in results:
        table.add_row(*(show(result) for show in columns.values()))
    console = Console()
    console.print(table)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    console.print(
        f"{about['date']}; {about['machine']}, load {about['load']}; {versions}", soft_wrap=True
    )


def _check(flag: str, values: Iterable[str], known: Iterable[str]) -> None:
    """Raises `ConfigError` unless each value is one of the known ones."""
    for value in values:
        if value not in known:
            raise ConfigError(f"{flag} {value}: unknown; known are {', '.join(known)}")


def _check_device(device: str) -> None:
    import torch

    _check("--device", [device], ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device; --device cpu needs none")


def _positive(text: str) -> Any:
    return typer.Option(min=1, help=text)


@app.command(cls=QuietCommand)
def attention(
    seq_length: Annotated[int, _positive("Tokens of the whole sequence.")] = 8192,
    cp: Annotated[int, _positive("Ranks; on the CPU each has one thread.")] = 2,
    heads: Annotated[int, _positive("Heads of queries, keys and values.")] = 8,
    head_dim: Annotated[int, _positive("Size of a head.")] = 64,
    dtype: Annotated[str, typer.Option(help="Default: float32 on the CPU, bfloat16 on CUDA.")] = "",
    device: Annotated[str, typer.Option(help="cpu, or cuda with one GPU per rank.")] = "cpu",
    repeats: Annotated[int, _positive("Rounds; each contestant runs once per round.")] = 5,
    only: Annotated[
        list[str] | None, typer.Option(help="A contestant; repeatable. Default: all installed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time attention, forward and backward. Beside one kernel call on one rank, and beside packages
    that are installed: ring-attention-pytorch on the CPU, TransformerEngine on CUDA.
    """
    import torch

    from cp_ring.tools.bench_attention import CONTESTANTS, Contest, run

    _check_device(device)
    _check("--dtype", [dtype] if dtype else [], _DTYPES)
    if device == "cuda" and torch.cuda.device_count() < cp:
        gpus = torch.cuda.device_count()
        raise ConfigError(f"--cp {cp} ranks need a CUDA device each, but there are {gpus}")
    if seq_length % (2 * cp):
        raise ConfigError(f"--seq-length {seq_length} does not divide by 2 * --cp {cp}")
    installed = {
        name
        for name, each in CONTESTANTS.items()
        if device in each.devices and importlib.util.find_spec(each.module)
    }
    for name in only or ():
        _check("--only", [name], CONTESTANTS)
        if name not in installed:
            raise ConfigError(
                f"--only {name}: it needs the package {CONTESTANTS[name].module} and --device "
                f"{' or '.join(CONTESTANTS[name].devices)}"
            )
    names = tuple(name for name in CONTESTANTS if name in (only or installed))
    dtype = dtype or {"cpu": "float32", "cuda": "bfloat16"}[device]
    results = run(Contest(seq_length, cp, heads, head_dim, dtype, device, names, repeats))
    ring = next((x["median_s"] for x in results if x["name"] == "cp_ring"), None)
    for result in results:
        result["over_cp_ring"] = result["median_s"] / ring if ring else None
    columns: Columns = {
        "": lambda x: x["name"],
        "median s": lambda x: f"{x['median_s']:.3f}",
        "min - max s": lambda x: f"{x['min_s']:.3f} - {x['max_s']:.3f}",
        "over cp_ring": lambda x: f"{x['over_cp_ring']:.2f}" if ring else "",
        "error": lambda x: f"{x['error']:.1e}",
    }
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
    columns: Columns = {
        "": lambda x: x["pass"],
        "ranks": lambda x: str(x["cp"]),
        "us a hop": lambda x: f"{x['hop_us']:.0f}",
        "cp_ring": lambda x: x["cp_ring"],
    }
    results = bench_host.run(repeats, against)
    _print("causal, one source a hop, 4 heads, CPU", columns, results, as_json)


@app.command(cls=QuietCommand)
def accuracy(
    seq_length: Annotated[int, _positive("Tokens of the whole sequence.")] = 2048,
    heads: Annotated[int, _positive("Query heads.")] = 2,
    kv_heads: Annotated[int, _positive("Key/value heads.")] = 1,
    head_dim: Annotated[int, _positive("Size of a head.")] = 64,
    kernel: Annotated[
        list[str] | None, typer.Option(help="As --cp-ring-kernel; repeatable. Default: cpu.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Repeatable. Default: float32, bfloat16.")
    ] = None,
    cp: Annotated[
        list[int] | None, typer.Option(help="Ranks; repeatable. Default: 1, 2, 4, 8.", min=1)
    ] = None,
    wire: Annotated[
        list[str] | None, typer.Option(help="As --cp-ring-wire; repeatable. Default: plain.")
    ] = None,
    inputs: Annotated[
        str, typer.Option(help="normal, or outliers: a few channels of keys are 20 times larger.")
    ] = "normal",
    seeds: Annotated[int, _positive("Random draws; the result is their mean.")] = 5,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Compare errors with those of one kernel call. Both against float64, on the whole sequence; of
    a codec that rounds, the error itself.
    """
    from cp_ring.kernels import REGISTRY
    from cp_ring.plan.sizes.attention_sizes import WIRES
    from cp_ring.tools.bench_accuracy import INPUTS, PARTS, AccuracyCases, run

    kernel, dtype, wire = kernel or ["cpu"], dtype or ["float32", "bfloat16"], wire or ["plain"]
    _check("--kernel", kernel, ("auto", *REGISTRY))
    _check("--dtype", dtype, (*_DTYPES, "float64"))
    _check("--wire", wire, [name for name, each in WIRES.items() if not each.latent])
    _check("--inputs", [inputs], INPUTS)
    _check_device(device)
    sizes = seq_length, heads, kv_heads, head_dim
    results = run(
        AccuracyCases(*sizes, kernel, dtype, cp or (1, 2, 4, 8), wire, inputs, seeds, device)
    )

    def error(part: str, result: Result) -> str:
        if "rejected" in result:
            return result["rejected"] if part == "out" else ""
        return f"{result['error'][part]:.1e}" if "error" in result else f"{result[part]:.2f}"

    def text(name: str, result: Result) -> str:
        return error(name, result) if name in PARTS else str(result.get(name, ""))

    names = ("kernel", "dtype", "mask", "cp", "wire", *PARTS)
    columns = {name: partial(text, name) for name in names}
    _print("error, ring / one call", columns, results, as_json)
