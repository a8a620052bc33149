"""The command line of `cp-ring bench replay`; the measurement is imported when it runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cp_ring.cli.options import AsJson, HeadDim


def bench_replay(
    cp: Annotated[list[int] | None, typer.Option(min=1, help="Context-parallel size; repeatable. Default: 1, 2, 4, 8.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of one rank.")] = 8192,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads.")] = 8,
    head_dim: HeadDim = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    kernel: Annotated[str, typer.Option(help="As --cp-ring-kernel.")] = "auto",
    window: Annotated[int, typer.Option(help="A query sees itself and this many keys before it; -1 for all.")] = -1,
    document: Annotated[int, typer.Option(help="Average tokens of packed documents; 0 for one sequence.")] = 0,
    layout: Annotated[str, typer.Option(help="zigzag or balanced. Default: balanced with --document, else zigzag.")] = "",
    bandwidth: Annotated[float, typer.Option(help="GB per second of a simulated link, only with CUDA; 0 for none.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Each time is the median of so many.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Run every rank of a group in turn on one device: efficiency against one kernel call, without a network."""
    import torch

    from cp_ring.bench import samples
    from cp_ring.bench.machine import facts
    from cp_ring.bench.replay import RankSizes, efficiency
    from cp_ring.errors import ConfigError
    from cp_ring.plan import Mask

    if dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"--dtype {dtype}: it is bfloat16, float16 or float32")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: it is cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device; --device cpu runs on the CPU")
    layout = layout or ("balanced" if document else "zigzag")
    if layout not in ("zigzag", "balanced"):
        raise ConfigError(f"--layout {layout}: it is zigzag or balanced")
    sizes = RankSizes(tokens, heads, kv_heads, head_dim, head_dim, getattr(torch, dtype), device)
    results = []
    for ranks in cp or [1, 2, 4, 8]:
        n = ranks * tokens
        mask = (
            Mask.documents(samples.exponential(n, document, 0), window=(window, 0)) if document else Mask.causal(n, (window, 0))
        )
        link = bandwidth * 1e9 or None
        results.append(efficiency(ranks, mask, sizes, kernel=kernel, repeats=repeats, bandwidth=link, layout=layout))
    if as_json:
        typer.echo(json.dumps({**facts(), "rows": results}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("cp", "kernel", "forward", "forward + backward", "slowest rank, ms", title="single-device replay, no network")
    for result in results:
        shares = f"{result['efficiency_forward']:.3f}", f"{result['efficiency_both']:.3f}"
        table.add_row(str(result["cp"]), result["kernel"], *shares, f"{1e3 * result['slowest_both_s']:.1f}")
    Console().print(table)
