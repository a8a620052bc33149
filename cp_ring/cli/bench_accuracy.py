"""The command line of `cp-ring bench accuracy`; the measurement is imported when it runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cp_ring.cli.options import AsJson, HeadDim


def bench_accuracy(
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens of the whole sequence.")] = 2048,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 2,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads.")] = 1,
    head_dim: HeadDim = 64,
    kernel: Annotated[list[str] | None, typer.Option(help="As --cp-ring-kernel; repeatable. Default: cpu.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Repeatable. Default: float32, bfloat16.")] = None,
    cp: Annotated[list[int] | None, typer.Option(min=1, help="Ranks; repeatable. Default: 1, 2, 4, 8.")] = None,
    wire: Annotated[list[str] | None, typer.Option(help="As --cp-ring-wire; repeatable. Default: plain.")] = None,
    inputs: Annotated[str, typer.Option(help="normal, or outliers: a few channels of keys are 20 times larger.")] = "normal",
    seeds: Annotated[int, typer.Option(min=1, help="Random draws; the result is their mean.")] = 5,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Error of ring attention against float64, divided by the error of one call of the same kernel on the whole sequence."""
    import torch

    from cp_ring.bench.accuracy import INPUTS, PARTS, run
    from cp_ring.bench.machine import facts
    from cp_ring.comm.codecs import CODECS, Quantized
    from cp_ring.errors import ConfigError
    from cp_ring.kernels import REGISTRY

    kernels, dtypes, sizes = kernel or ["cpu"], dtype or ["float32", "bfloat16"], cp or [1, 2, 4, 8]
    for flag, given, known in (
        ("--kernel", kernels, ["auto", *REGISTRY]),
        ("--dtype", dtypes, ["float16", "bfloat16", "float32", "float64"]),
        ("--wire", wire or [], ["plain", *(name for name, codec in CODECS.items() if issubclass(codec, Quantized))]),
        ("--inputs", [inputs], list(INPUTS)),
        ("--device", [device], ["cpu", "cuda"]),
    ):
        for value in given:
            if value not in known:
                raise ConfigError(f"{flag} {value}: unknown; known are {', '.join(known)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device; --device cpu measures the kernels for the CPU")
    results = run(
        seq_length, heads, kv_heads, head_dim, kernels, dtypes, sizes, seeds, device, wires=wire or ["plain"], drawn=inputs
    )
    if as_json:
        typer.echo(json.dumps({**facts(), "rows": results}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel", "dtype", "mask", "cp", "wire", *PARTS, title="error, ring / one call; of a codec the error itself")
    for result in results:
        if "rejected" in result:
            table.add_row(result["kernel"], result["dtype"], result["mask"], "", "", result["rejected"])
        else:
            shown = [f"{result[part]:.2f}" for part in PARTS]
            if "error" in result:
                shown = [f"{result['error'][part]:.1e}" for part in PARTS]
            table.add_row(result["kernel"], result["dtype"], result["mask"], str(result["cp"]), result["wire"], *shown)
    Console().print(table)
