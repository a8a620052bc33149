"""The command line of `cp-ring bench attention`; the measurement is imported when it runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cp_ring.cli.options import AsJson, HeadDim, Heads


def bench_attention(
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens of the whole sequence.")] = 8192,
    cp: Annotated[int, typer.Option(min=1, help="Ranks; on the CPU each has one thread.")] = 2,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16. Default: float32 on the CPU, bfloat16 on CUDA.")] = "",
    device: Annotated[str, typer.Option(help="cpu, or cuda with one GPU per rank.")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each contestant runs once per round.")] = 5,
    only: Annotated[list[str] | None, typer.Option(help="A contestant; repeatable. Default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time causal ring attention, forward and backward, beside one rank and beside other packages that are installed.

    Packages on the CPU: pip install ring-attention-pytorch ringattention; on CUDA: ring-flash-attn, transformer-engine[pytorch].
    """
    import os

    import torch

    from cp_ring.bench.attention import CONTESTANTS, Contest, run
    from cp_ring.bench.machine import facts
    from cp_ring.errors import ConfigError

    for flag, value, known in (("--device", device, ("cpu", "cuda")), ("--dtype", dtype, ("", "float32", "bfloat16", "float16"))):
        if value not in known:
            raise ConfigError(f"{flag} {value}: it is {' or '.join(filter(None, known))}")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and (not devices or (devices < cp and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1")):
        raise ConfigError(
            f"--device cuda: --cp {cp} ranks need a CUDA device each, there are {devices}; bench replay runs them on one"
        )
    names = only or [name for name, contestant in CONTESTANTS.items() if device in contestant.devices]
    unknown = sorted(set(names) - set(CONTESTANTS))
    if unknown:
        raise ConfigError(f"--only {unknown[0]}: no such contestant; there are {', '.join(CONTESTANTS)}")
    elsewhere = [name for name in names if device not in CONTESTANTS[name].devices]
    if elsewhere:
        raise ConfigError(f"--only {elsewhere[0]}: it does not run with --device {device}")
    if seq_length % (2 * cp):
        raise ConfigError(f"--seq-length {seq_length} does not divide by 2 * --cp {cp}")
    dtype = dtype or {"cpu": "float32", "cuda": "bfloat16"}[device]
    results = run(Contest(seq_length, cp, heads, head_dim, dtype, device), names, repeats)
    if as_json:
        typer.echo(json.dumps({**facts(), "rows": results}))
        return
    from rich.console import Console
    from rich.table import Table

    ours = next((result.get("median_s") for result in results if result["name"] == "cp_ring"), None)
    table = Table(
        "", "median s", "min - max s", "over cp_ring", "error", title=f"causal, {seq_length} x {heads} x {head_dim}, {cp} ranks"
    )
    for result in results:
        if "skipped" in result:
            table.add_row(result["name"], result["skipped"])
            continue
        times = result["median_s"], f"{result['min_s']:.2f} - {result['max_s']:.2f}"
        table.add_row(
            result["name"], f"{times[0]:.2f}", times[1], f"{times[0] / ours:.2f}" if ours else "", f"{result['error']:.1e}"
        )
    Console().print(table)
    made = facts()
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    Console().print(f"{made['date']}; {made['machine']}, load {made['load']}; {versions}", soft_wrap=True)
