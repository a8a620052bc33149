"""`cp-ring plan`: a plan as a table, as JSON, and as a picture."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cp_ring.bench import samples
from cp_ring.errors import PlanError
from cp_ring.plan.cost import AttentionSizes, Cost, between_nodes, cost
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ring_plan import RingPlan
from cp_ring.plan.verify import Report

LAYOUTS = ("zigzag", "contiguous", "balanced", "per_document_zigzag")
MAX_ROWS = 32
MAX_TOKENS = 1 << 30  # the proof marks each token with a byte


def plan_command(
    seq_length: Annotated[int, typer.Option(help="Tokens of the sequence, or of the stream of packed documents.")],
    cp: Annotated[int, typer.Option(help="Context-parallel ranks.")],
    window: Annotated[int, typer.Option(help="A query sees itself and so many keys before it; -1 for all.")] = -1,
    full: Annotated[bool, typer.Option("--full", help="No causal mask: a query sees later keys too.")] = False,
    prefix: Annotated[int, typer.Option(help="Every query sees the first so many keys of its document.")] = 0,
    documents: Annotated[str | None, typer.Option(help="File of document lengths, separated by white space.")] = None,
    documents_mean: Annotated[float, typer.Option(help="Random documents, exponential lengths of this mean; 0 for none.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random documents.")] = 0,
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(LAYOUTS)}.")] = "zigzag",
    chunks_per_rank: Annotated[int | None, typer.Option(help="Chunks per rank of the balanced layout.")] = None,
    route: Annotated[str, typer.Option(help="direct or ring.")] = "direct",
    num_slots: Annotated[int, typer.Option(help="Receive buffers for keys and values.")] = 2,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads; only these travel.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 128,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    ranks_per_node: Annotated[int, typer.Option(help="Neighboring ranks on one node.")] = 8,
    draw: Annotated[str | None, typer.Option(metavar="PATH", help="Write the picture to a .png, .svg or .pdf file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Plan, prove, cost and draw the attention of one layer; needs no GPU and no process group."""
    if ranks_per_node < 1:
        raise PlanError(f"--ranks-per-node {ranks_per_node}: it must be at least 1")
    if draw:
        from cp_ring.cli.drawing import check_path

        check_path(draw)
    sizes = AttentionSizes(heads, kv_heads, head_dim, dtype=dtype)
    with _memory(seq_length, cp):
        offsets = _offsets(seq_length, documents, documents_mean, seed)
        mask = _mask(seq_length, offsets, window, full, prefix)
        chosen = _layout(layout, mask, offsets, cp, chunks_per_rank)
        plan, build_ms = _timed(lambda: RingPlan.build(mask, chosen, route))
        report, verify_ms = _timed(lambda: plan.verify(num_slots))
    costs = cost(report, sizes, num_slots)
    facts = summary(plan, report, costs, ranks_per_node) | {"build_ms": build_ms, "verify_ms": verify_ms}
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        _print(plan, facts)
    if draw:
        from cp_ring.cli.drawing import draw as draw_plan

        draw_plan(plan, draw, report, sizes)
        typer.echo(f"wrote {draw}", err=as_json)


def summary(plan: RingPlan, report: Report, costs: Cost, ranks_per_node: int) -> dict[str, Any]:
    """The numbers of a plan, ready for JSON. Bytes are keys and values of one forward pass."""
    return {
        "mask": plan.mask.name,
        "layout": plan.layout.name,
        "route": plan.route,
        "n": plan.n,
        "cp": plan.cp,
        "tokens_per_rank": report.tokens_per_rank.tolist(),
        "work_per_rank": report.work_per_rank.tolist(),
        "bytes_in_per_rank": costs.bytes_in.sum(1).tolist(),
        "bytes_out_per_rank": costs.bytes_out.sum(1).tolist(),
        "gradient_bytes_in_per_rank": costs.gradient_bytes_in.sum(1).tolist(),
        "gradient_bytes_out_per_rank": costs.gradient_bytes_out.sum(1).tolist(),
        "forward_flops_per_rank": costs.forward_flops.sum(1).tolist(),
        "backward_flops_per_rank": costs.backward_flops.sum(1).tolist(),
        "moving_hops_per_rank": report.moving_hops.tolist(),
        "moving_hops": int((report.keys_in.sum(0) > 0).sum()),
        "share_of_full_ring": report.share_of_full_ring,
        "share_between_nodes": between_nodes(plan, ranks_per_node),
        "balance": report.balance,
        "slots": report.slots,
        "memory": costs.memory,
    }


def _offsets(n: int, path: str | None, mean: float, seed: int) -> Any:
    if not 1 <= n <= MAX_TOKENS:
        raise PlanError(f"--seq-length {n}: it must be at least 1 and at most {MAX_TOKENS}")
    if seed < 0:
        raise PlanError(f"--seed {seed}: it must be at least 0")
    if path and mean:
        raise PlanError("--documents and --documents-mean exclude one another")
    if path:
        return samples.from_file(path, n)
    return samples.exponential(n, mean, seed) if mean else None


def _mask(n: int, offsets: Any, window: int, full: bool, prefix: int) -> Mask:
    if prefix:
        lengths = prefix if offsets is None else (offsets[1:] - offsets[:-1]).clip(max=prefix)
        return Mask.prefix(n, lengths, offsets, (window, -1 if full else 0))
    if offsets is None:
        return Mask.full(n, (window, window)) if full else Mask.causal(n, (window, 0))
    return Mask.documents(offsets, causal=not full, window=(window, window if full else 0), n=n)


def _layout(name: str, mask: Mask, offsets: Any, cp: int, chunks_per_rank: int | None) -> Layout:
    if name not in LAYOUTS:
        raise PlanError(f"--layout {name!r}: known are {', '.join(LAYOUTS)}")
    if chunks_per_rank is not None and name != "balanced":
        raise PlanError(f"--chunks-per-rank {chunks_per_rank} is for --layout balanced, not {name}")
    if name == "balanced":
        return Layout.balanced(mask, cp, chunks_per_rank)
    if name == "per_document_zigzag":
        return Layout.per_document_zigzag([0, mask.n] if offsets is None else offsets, cp)
    return (Layout.zigzag if name == "zigzag" else Layout.contiguous)(mask.n, cp)


@contextmanager
def _memory(n: int, cp: int) -> Iterator[None]:
    """Refuses what does not fit into this machine's memory."""
    try:
        yield
    except MemoryError as error:
        raise PlanError(f"--seq-length {n} --cp {cp}: the plan does not fit into memory: {error}") from None


def _timed(make: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    made = make()
    return made, (time.perf_counter() - start) * 1e3


def _print(plan: RingPlan, facts: dict[str, Any]) -> None:
    console = Console()
    table = Table(title=f"{plan.mask!r}, {plan.layout!r}, {plan.route} route")
    for name in ("rank", "tokens", "work (pairs)", "of mean", "MiB in", "MiB out", "moving hops"):
        table.add_column(name, justify="right")
    mean = sum(facts["work_per_rank"]) / plan.cp or 1
    for rank in range(plan.cp)[:MAX_ROWS]:
        work, bytes_in, bytes_out = (facts[f"{name}_per_rank"][rank] for name in ("work", "bytes_in", "bytes_out"))
        moved = [f"{amount / 2**20:,.1f}" for amount in (bytes_in, bytes_out)]
        row = (rank, f"{facts['tokens_per_rank'][rank]:,}", f"{work:,}", f"{work / mean:.3f}", *moved)
        table.add_row(*map(str, row), str(facts["moving_hops_per_rank"][rank]))
    console.print(table)
    if plan.cp > MAX_ROWS:
        console.print(f"... and {plan.cp - MAX_ROWS} more ranks (--json has all)")
    console.print(
        f"balance {facts['balance']:.3f} (max / mean work); {facts['share_of_full_ring']:.1%} of a full ring on the wire, "
        f"{facts['share_between_nodes']:.1%} of that between nodes; proven: built in {facts['build_ms']:.1f} ms, "
        f"verified in {facts['verify_ms']:.1f} ms, {facts['slots']} receive buffers in use"
    )
    buffers = Table("buffer, on the rank that needs most of it", "MiB")
    for name, size in facts["memory"].items():
        buffers.add_row(name, f"{size / 2**20:,.1f}")
    console.print(buffers)
