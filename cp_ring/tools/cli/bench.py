"""`cp-ring bench`: the table of benches, and the one command that runs them.

A bench is its options, a function that measures, and the columns of its table. The modules of
`cp_ring.tools.bench` are imported when a bench runs, so that help is quick.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from cp_ring.errors import ConfigError
from cp_ring.tools.cli.option_models import QuietCommand, QuietGroup, command, option, parse_tokens

Result = dict[str, Any]
Column = str | Callable[[Result], str]
"""What a column shows of a result: a format with the result's keys, or a function of the result."""


@dataclass(frozen=True)
class Measured:
    """What a bench has measured. A result that could not be measured has the reason in `skipped`.

    title: of the table. about: further keys of the JSON. lines: printed in place of a table.
    """

    results: list[Result]
    title: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bench:
    """A command of `cp-ring bench`: `run` gets an instance of `options`, and has the help.

    key: that of the results in the JSON; "" prints the results alone.
    """

    name: str
    options: type
    run: Callable[[Any], Measured]
    columns: Mapping[str, Column] = field(default_factory=dict)
    key: str = "rows"


def commands() -> typer.Typer:
    """The command `cp-ring bench` with all benches."""
    app = typer.Typer(cls=QuietGroup, no_args_is_help=True, help="Measure cp_ring on this machine.")
    as_json = ("as_json", bool, option(False, "Print JSON instead of the table.", "--json"))
    for bench in BENCHES:
        options = make_dataclass(
            bench.options.__name__, [as_json], bases=(bench.options,), frozen=True, kw_only=True
        )
        made = command(options, partial(_run, bench))
        made.__doc__ = bench.run.__doc__
        app.command(bench.name, cls=QuietCommand)(made)
    return app


def _run(bench: Bench, options: Any) -> None:
    from cp_ring.testing.network import NoNamespacesError

    try:
        measured = bench.run(options)
    except NoNamespacesError as error:
        measured = Measured([{"skipped": str(error)}])
    _tell(bench, measured, options.as_json)


def _tell(bench: Bench, measured: Measured, as_json: bool) -> None:
    """Prints what was measured, and where and when."""
    from cp_ring.tools.bench.machine import facts

    made = facts()
    results = measured.results
    if as_json:
        if bench.key:
            typer.echo(json.dumps({**made, **measured.about, bench.key: results}))
        else:
            typer.echo(json.dumps(measured.about or results))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if measured.lines:
        for line in measured.lines:
            typer.echo(line)
        return
    if results and all("skipped" in result for result in results):
        console.print(f"not measured: {results[0]['skipped']}", soft_wrap=True)
        return
    table = Table(*bench.columns, title=measured.title)
    for result in results:
        cells = [
            x.format_map(result) if isinstance(x, str) else x(result)
            for x in _columns(bench, result)
        ]
        table.add_row(*cells)
    console.print(table)
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    console.print(
        f"{made['date']}; {made['machine']}, load {made['load']}; {versions}", soft_wrap=True
    )


def _columns(bench: Bench, result: Result) -> list[Column]:
    """The columns of a result; of one that was not measured the name, and the reason."""
    columns = list(bench.columns.values())
    return [columns[0], "{skipped}"] if "skipped" in result else columns


def check(flag: str, value: str, known: tuple[str, ...]) -> None:
    """Raises `ConfigError` unless the value is one of the known ones."""
    if value not in known:
        raise ConfigError(f"{flag} {value}: it is {' or '.join(filter(None, known))}")


_MEDIAN = {"median s": "{median_s:.3f}", "min - max s": "{min_s:.3f} - {max_s:.3f}"}
_DTYPES = ("float32", "bfloat16", "float16")
_ATTENTION: dict[str, Column] = {
    "": "{name}",
    "median s": "{median_s:.2f}",
    "min - max s": "{min_s:.2f} - {max_s:.2f}",
    "over cp_ring": lambda result: (
        f"{result['over_cp_ring']:.2f}" if result["over_cp_ring"] else ""
    ),
    "error": "{error:.1e}",
}


def _tokens(default: int, text: str, **more: Any) -> Any:
    return option(default, text, min=1, **more)


def _heads(default: int = 8, text: str = "Heads of queries, keys and values.") -> Any:
    return option(default, text, min=1)


def _head_dim(default: int = 64) -> Any:
    return option(default, "Size of a head.", min=1)


def _repeats(default: int, text: str) -> Any:
    return option(default, text, min=1)


@dataclass(frozen=True, kw_only=True)
class PlanBench:
    """Options of `bench plan`."""

    repeats: int = _repeats(5, "Each time is the best of this many.")


def _plan(options: PlanBench) -> Measured:
    """Measure planning: time, memory, bytes on the wire and balance, each with its goal."""
    from cp_ring.tools.bench.planning import run

    return Measured([result._asdict() for result in run(options.repeats)], "cp_ring planning")


@dataclass(frozen=True, kw_only=True)
class AttentionBench:
    """Options of `bench attention`."""

    seq_length: int = _tokens(8192, "Tokens of the whole sequence.")
    cp: int = option(2, "Ranks; on the CPU each has one thread.", min=1)
    heads: int = _heads()
    head_dim: int = _head_dim()
    dtype: str = option(
        "", "float32, bfloat16 or float16. Default: float32 on the CPU, bfloat16 on CUDA."
    )
    device: str = option("cpu", "cpu, or cuda with one GPU per rank.")
    repeats: int = _repeats(5, "Rounds; each contestant runs once per round.")
    only: list[str] | None = option(None, "A contestant; repeatable. Default: all.")


def _attention(options: AttentionBench) -> Measured:
    """Time causal ring attention, forward and backward, beside one rank and beside other packages
    that are installed.

    Packages on the CPU: pip install ring-attention-pytorch ringattention; on CUDA: ring-flash-attn,
    transformer-engine[pytorch].
    """
    import torch

    from cp_ring.tools.bench.contestants import CONTESTANTS, Contest, run

    device = options.device
    cp = options.cp
    n = options.seq_length
    check("--device", device, ("cpu", "cuda"))
    check("--dtype", options.dtype, ("", *_DTYPES))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if device == "cuda" and (not devices or (devices < cp and not shared)):
        raise ConfigError(
            f"--device cuda: --cp {cp} ranks need a CUDA device each, there are {devices}; bench "
            "replay runs them on one"
        )
    names = options.only or [name for name, one in CONTESTANTS.items() if device in one.devices]
    for name in names:
        if name not in CONTESTANTS:
            raise ConfigError(
                f"--only {name}: no such contestant; there are {', '.join(CONTESTANTS)}"
            )
        if device not in CONTESTANTS[name].devices:
            raise ConfigError(f"--only {name}: it does not run with --device {device}")
    if n % (2 * cp):
        raise ConfigError(f"--seq-length {n} does not divide by 2 * --cp {cp}")
    dtype = options.dtype or {"cpu": "float32", "cuda": "bfloat16"}[device]
    results = run(
        Contest(n, cp, options.heads, options.head_dim, dtype, device), names, options.repeats
    )
    ours = next((result.get("median_s") for result in results if result["name"] == "cp_ring"), None)
    for result in results:
        if "skipped" not in result:
            result["over_cp_ring"] = result["median_s"] / ours if ours else None
    return Measured(results, f"causal, {n} x {options.heads} x {options.head_dim}, {cp} ranks")


@dataclass(frozen=True, kw_only=True)
class AccuracyBench:
    """Options of `bench accuracy`."""

    seq_length: int = _tokens(2048, "Tokens of the whole sequence.")
    heads: int = _heads(2, "Query heads.")
    kv_heads: int = _heads(1, "Key/value heads.")
    head_dim: int = _head_dim()
    kernel: list[str] | None = option(None, "As --cp-ring-kernel; repeatable. Default: cpu.")
    dtype: list[str] | None = option(None, "Repeatable. Default: float32, bfloat16.")
    cp: list[int] | None = option(None, "Ranks; repeatable. Default: 1, 2, 4, 8.", min=1)
    wire: list[str] | None = option(None, "As --cp-ring-wire; repeatable. Default: plain.")
    inputs: str = option(
        "normal", "normal, or outliers: a few channels of keys are 20 times larger."
    )
    seeds: int = option(5, "Random draws; the result is their mean.", min=1)
    device: str = option("cpu", "cuda or cpu.")


def _accuracy(options: AccuracyBench) -> Measured:
    """Error of ring attention against float64, divided by the error of one call of the same kernel
    on the whole sequence.
    """
    import torch

    from cp_ring.comm.codecs import CODECS, Quantized
    from cp_ring.kernels import REGISTRY
    from cp_ring.tools.bench.accuracy import INPUTS, AccuracyCases, run

    kernels, dtypes = options.kernel or ["cpu"], options.dtype or ["float32", "bfloat16"]
    sizes, wires = options.cp or [1, 2, 4, 8], options.wire or ["plain"]
    codecs = [name for name, codec in CODECS.items() if issubclass(codec, Quantized)]
    for flag, given, known in (
        ("--kernel", kernels, ["auto", *REGISTRY]),
        ("--dtype", dtypes, ["float16", "bfloat16", "float32", "float64"]),
        ("--wire", wires, ["plain", *codecs]),
        ("--inputs", [options.inputs], list(INPUTS)),
        ("--device", [options.device], ["cpu", "cuda"]),
    ):
        for value in given:
            if value not in known:
                raise ConfigError(f"{flag} {value}: unknown; known are {', '.join(known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: there is no CUDA device; --device cpu measures the kernels for the CPU"
        )
    cases = AccuracyCases(
        options.seq_length,
        options.heads,
        options.kv_heads,
        options.head_dim,
        kernels,
        dtypes,
        sizes,
        wires,
        options.inputs,
        options.seeds,
        options.device,
    )
    results = run(cases)
    return Measured(results, "error, ring / one call; of a codec the error itself")


def _accuracy_cell(name: str) -> Callable[[Result], str]:
    """A column of `bench accuracy`. A case that a kernel rejects has the reason in the first of the
    errors.
    """

    def cell(result: Result) -> str:
        if name not in ("out", "dq", "dk", "dv"):
            return str(result.get(name, ""))
        if "rejected" in result:
            return str(result["rejected"]) if name == "out" else ""
        return f"{result['error'][name]:.1e}" if "error" in result else f"{result[name]:.2f}"

    return cell


@dataclass(frozen=True, kw_only=True)
class ReplayBench:
    """Options of `bench replay`."""

    cp: list[int] | None = option(
        None, "Context-parallel size; repeatable. Default: 1, 2, 4, 8.", min=1
    )
    tokens: int = _tokens(8192, "Tokens of one rank.")
    heads: int = _heads(32, "Query heads.")
    kv_heads: int = _heads(8, "Key/value heads.")
    head_dim: int = _head_dim(128)
    dtype: str = option("bfloat16", "bfloat16, float16 or float32.")
    device: str = option("cuda", "cuda or cpu.")
    kernel: str = option("auto", "As --cp-ring-kernel.")
    window: int = option(-1, "A query sees itself and this many keys before it; -1 for all.")
    document: int = option(0, "Average tokens of packed documents; 0 for one sequence.", min=0)
    layout: str = option("", "zigzag or balanced. Default: balanced with --document, else zigzag.")
    bandwidth: float = option(
        0.0, "GB per second of a simulated link, only with CUDA; 0 for none.", min=0
    )
    repeats: int = _repeats(5, "Repetitions; the median is reported.")


def _replay(options: ReplayBench) -> Measured:
    """Run every rank of a group in turn on one device: efficiency against one kernel call, without
    a network.
    """
    import torch

    from cp_ring.kernels import REGISTRY
    from cp_ring.plan import Mask
    from cp_ring.plan.plan import PlanSpec
    from cp_ring.tools.bench import samples
    from cp_ring.tools.bench.replay import RankSizes, efficiency

    check("--dtype", options.dtype, ("bfloat16", "float16", "float32"))
    check("--device", options.device, ("cpu", "cuda"))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device; --device cpu runs on the CPU")
    layout = options.layout or ("balanced" if options.document else "zigzag")
    check("--layout", layout, ("zigzag", "balanced"))
    check("--kernel", options.kernel, ("auto", *REGISTRY))
    dtype, size, window = getattr(torch, options.dtype), options.head_dim, (options.window, 0)
    sizes = RankSizes(
        options.tokens, options.heads, options.kv_heads, size, size, dtype, options.device
    )
    results = []
    for ranks in options.cp or [1, 2, 4, 8]:
        n = ranks * options.tokens
        mask = Mask.causal(n, window)
        if options.document:
            mask = Mask.documents(samples.exponential(n, options.document, 0), window=window)
        link = options.bandwidth * 1e9 or None
        results.append(
            efficiency(
                PlanSpec(layout).build(mask, ranks),
                sizes,
                kernel=options.kernel,
                repeats=options.repeats,
                bandwidth=link,
            )
        )
    return Measured(results, "single-device replay, no network")


@dataclass(frozen=True, kw_only=True)
class OverlapBench:
    """Options of `bench overlap`."""

    seq_length: int = _tokens(8192, "Tokens of the whole sequence, on two ranks.")
    heads: int = _heads()
    head_dim: int = _head_dim()
    ratio: list[float] | None = option(
        None,
        "Time of a full shard on the wire, divided by the time that a hop computes; repeatable.",
    )
    repeats: int = _repeats(7, "Rounds; each wire runs once per round.")


def _overlap(options: OverlapBench) -> Measured:
    """Time forward and backward on two CPU ranks with a throttled link between them: how much
    communication is exposed.

    Needs root, for network namespaces. Where it cannot make them, it prints why and measures
    nothing. Default ratios: 0.5, 0.9.
    """
    from cp_ring.tools.bench.contest import Contest
    from cp_ring.tools.bench.overlap import run

    n = options.seq_length
    if n < 4 or n % 4:
        raise ConfigError(f"--seq-length {n} does not divide by 4, the chunks of two ranks")
    bad = [x for x in options.ratio or [] if not x > 0]
    if bad:
        raise ConfigError(f"--ratio {bad[0]:g} must be above 0")
    contest = Contest(n, 2, options.heads, options.head_dim)
    results = run(contest, options.ratio or [0.5, 0.9], options.repeats)
    return Measured(
        results, f"causal, {n} x {options.heads} x {options.head_dim}, 2 ranks, throttled link"
    )


@dataclass(frozen=True, kw_only=True)
class WireBench:
    """Options of `bench wire`."""

    seq_length: int = _tokens(4096, "Tokens of the whole sequence, on two ranks.")
    ratio: float = option(
        3.0, "Time of plain's messages on the wire, divided by its time on the free wire."
    )
    repeats: int = _repeats(5, "Rounds; each codec runs once per round.")


def _wire(options: WireBench) -> Measured:
    """Time forward and backward with each codec on two CPU ranks with a throttled link between
    them.

    Needs root, for network namespaces. Where it cannot make them, it prints why and measures
    nothing.
    """
    from cp_ring.tools.bench.slow_wire import run

    n, ratio = options.seq_length, options.ratio
    if n < 4 or n % 4:
        raise ConfigError(f"--seq-length {n} does not divide by 4, the chunks of two ranks")
    if not ratio > 0:
        raise ConfigError(f"--ratio {ratio:g} must be above 0")
    title = f"causal, {n} tokens, 2 ranks, float32, a wire on which plain takes {ratio:g} x"
    return Measured(run(n, ratio, options.repeats), title)


@dataclass(frozen=True, kw_only=True)
class HostBench:
    """Options of `bench host`."""

    repeats: int = _repeats(100, "Calls of each pass that count.")
    against: Path | None = option(
        None, "A checkout of another version, measured in turn with this one.", metavar="FOLDER"
    )


def _host(options: HostBench) -> Measured:
    """Time what the host does in a hop beyond attention and messages: Python, merges, sums, views,
    the kernel's adapter.
    """
    from cp_ring.tools.bench.host import run

    against = options.against
    if against is not None and not (against / "cp_ring" / "__init__.py").is_file():
        raise ConfigError(f"--against {against}: there is no cp_ring/__init__.py in it")
    return Measured(run(options.repeats, against), "causal, one source a hop, 4 heads, CPU")


@dataclass(frozen=True, kw_only=True)
class RatesBench:
    """Options of `bench rates`."""

    megabytes: int = option(32, "MiB of a message, and of a copy.", min=1, max=1024)
    repeats: int = _repeats(5, "Runs of each measurement; the best counts.")


def _rates(options: RatesBench) -> Measured:
    """Measure what this machine's kernel, memory and links do in a second: the rates that cp-ring
    plan assumes.
    """
    from cp_ring.tools.bench import machine

    found = machine.run(options.megabytes, options.repeats)
    link = found["link_gb_s"]
    lines = (
        f"{found['device']}, kernel {found['kernel']}: {found['tflops']:.3g} TFLOP/s, "
        f"{found['call_us']:.3g} us a call, memory {found['memory_gb_s']:.3g} GB/s"
        + (", no second GPU for a link" if link is None else f", link {link:.3g} GB/s"),
        f"cp-ring plan --tflops {found['tflops']:.3g}"
        + ("" if link is None else f" --node-bandwidth {link:.3g}")
        + " ...",
    )
    return Measured([], about={**machine.facts(), **found}, lines=lines)


@dataclass(frozen=True, kw_only=True)
class LengthsBench:
    """Options of `bench lengths`."""

    seq_length: int = option(
        8192, "Tokens of all documents together.", parser=parse_tokens, metavar="TOKENS"
    )
    cp: int = option(
        4, "Ranks, each with one thread: at most one a core.", "--cp", "--ranks", min=2
    )
    lengths: str = option(
        "", "As in `cp-ring plan`; default: one long document and many short ones.", metavar="SPEC"
    )
    heads: int = _heads(4)
    head_dim: int = _head_dim()
    repeats: int = _repeats(7, "Rounds; each split runs once per round.")
    seed: int = option(0, "Seed of random lengths.", min=0)


def _lengths(options: LengthsBench) -> Measured:
    """Time attention and a token-wise layer on documents of a long-tailed set: balanced, zigzag,
    padded, independent ranks, Megatron's dynamic groups of ranks.
    """
    from cp_ring.tools.bench import samples
    from cp_ring.tools.bench.lengths import LAYOUTS, PackedWork, long_tail, run, shares

    n, cp, seed = options.seq_length, options.cp, options.seed
    if n < 128 * cp:
        raise ConfigError(f"--seq-length {n}: {cp} ranks need at least {128 * cp} tokens")
    drawn = samples.lengths(options.lengths, n, seed) if options.lengths else long_tail(n, seed)
    work = PackedWork(tuple(drawn.tolist()), cp, options.heads, options.head_dim)
    names, skipped = list(LAYOUTS), []
    try:
        shares(work, "dynamic")
    except ConfigError as error:  # without Megatron, or where its scheduler fails
        names.remove("dynamic")
        skipped = [{"layout": "dynamic", "skipped": str(error)}]
    results = run(work, names, options.repeats)
    for result in results:
        for name in ("median_s", "cpu_s"):
            result[f"{name}_over_balanced"] = result[name] / results[0][name]
    title = (
        f"{len(drawn)} documents, {drawn.sum():,} tokens, the longest {drawn.max():,}; {cp} ranks"
    )
    about = {"documents": len(drawn), "longest": int(drawn.max())}
    return Measured(results + skipped, title, about)


@dataclass(frozen=True, kw_only=True)
class NodesBench:
    """Options of `bench nodes`."""

    seq_length: int = _tokens(4096, "Tokens of the whole sequence, on four ranks.")
    heads: int = _heads()
    head_dim: int = _head_dim()
    share: float = option(
        0.5, "Speed of the link, as a share of what hiding the transfers of direct would need."
    )
    full: bool = option(False, "A full mask instead of a causal one.", "--full")
    repeats: int = _repeats(5, "Rounds; each shape runs once per round.")


def _nodes(options: NodesBench) -> Measured:
    """Time forward and backward on two nodes of two CPU ranks each with a slow link between the
    nodes: direct, relay and heads.

    Needs root, for network namespaces, which are the nodes. Where it cannot make them, it prints
    why and measures nothing.
    """
    from cp_ring.tools.bench.contest import Contest
    from cp_ring.tools.bench.two_nodes import run

    n, heads = options.seq_length, options.heads
    if n % 8:
        raise ConfigError(f"--seq-length {n} does not divide by 8, the chunks of four ranks")
    if heads % 2:
        raise ConfigError(f"--heads {heads}: two ranks exchange heads, so it must divide by 2")
    if not options.share > 0:
        raise ConfigError(f"--share {options.share:g} must be above 0")
    results = run(
        Contest(n, 4, heads, options.head_dim), options.repeats, options.share, options.full
    )
    speed = f"{results[0].get('bytes_per_s', 0) / 1e6:.3g} MB/s between them"
    mask = "full" if options.full else "causal"
    return Measured(
        results, f"{mask}, {n} x {heads} x {options.head_dim}, 2 nodes of 2 ranks, {speed}"
    )


@dataclass(frozen=True, kw_only=True)
class TimingCostBench:
    """Options of `bench timing-cost`."""

    tokens: int = option(512, "Tokens of a rank.", parser=parse_tokens, metavar="TOKENS")
    repeats: int = option(40, "Pairs of calls.", min=1)


def _timing_cost(options: TimingCostBench) -> Measured:
    """
    Measure what --cp-ring-timing costs: in steps that are recorded, and in steps that are not.
    """
    from cp_ring.tools.bench import timing_cost

    tokens, repeats = options.tokens, options.repeats
    if tokens < 8 or tokens % 2:
        raise ConfigError(f"--tokens {tokens}: at least 8 tokens, an even number, are needed")
    results = timing_cost.run(tokens, repeats)
    lines = tuple(
        f"{x['what']}: {x['cost']:.3%} of a call of {x['call_ms']:.1f} ms" for x in results
    )
    return Measured(results, about={"tokens": tokens}, lines=lines)


@dataclass(frozen=True, kw_only=True)
class RecurrentBench:
    """Options of `bench recurrent`."""

    seq_length: int = _tokens(
        4096, "Tokens of the sequence.", parser=parse_tokens, metavar="TOKENS"
    )
    heads: int = _heads(8, "Heads of keys and values.")
    head_dim: int = _head_dim()
    repeats: int = _repeats(5, "Rounds.")


def _recurrent(options: RecurrentBench) -> Measured:
    """
    Time a gated delta net layer on 2 and 4 ranks, which exchange tokens for heads, or pass states.
    """
    from cp_ring.tools.bench.recurrent_ways import DeltaNet, run

    n, heads, size = options.seq_length, options.heads, options.head_dim
    if n % 8:
        raise ConfigError(f"--seq-length {n} does not divide by 8, the chunks of four ranks")
    if heads % 4:
        raise ConfigError(f"--heads {heads}: four ranks exchange heads, so it must divide by 4")
    results = run([DeltaNet(n, cp, heads, size, size) for cp in (2, 4)], options.repeats)
    return Measured(results, f"gated delta net, {n} x {heads} x {size}, float32, zigzag")


BENCHES = (
    Bench(
        "plan",
        PlanBench,
        _plan,
        {
            "": "{what}",
            "measured": "{measured:.3g} {unit}",
            "goal (at most)": lambda result: (
                f"{result['goal']:g} {result['unit']}" if result["goal"] else ""
            ),
        },
        key="",
    ),
    Bench("attention", AttentionBench, _attention, _ATTENTION),
    Bench(
        "accuracy",
        AccuracyBench,
        _accuracy,
        {
            name: _accuracy_cell(name)
            for name in ("kernel", "dtype", "mask", "cp", "wire", "out", "dq", "dk", "dv")
        },
    ),
    Bench(
        "replay",
        ReplayBench,
        _replay,
        {
            "cp": "{cp}",
            "kernel": "{kernel}",
            "forward": "{efficiency_forward:.3f}",
            "forward + backward": "{efficiency_both:.3f}",
            "slowest rank, ms": lambda result: f"{1e3 * result['slowest_both_s']:.1f}",
        },
    ),
    Bench(
        "overlap",
        OverlapBench,
        _overlap,
        {
            "transfer / compute of a hop": lambda result: (
                f"{result['ratio']:g}" if result["ratio"] else "free wire"
            ),
            "of them, ms": lambda result: (
                f"{1e3 * result['transfer_s']:.0f} / {1e3 * result['hop_s']:.0f}"
            ),
            "step, median s": "{median_s:.3f}",
            "min - max s": "{min_s:.3f} - {max_s:.3f}",
            "exposed": "{exposed:.1%}",
        },
    ),
    Bench(
        "wire",
        WireBench,
        _wire,
        {
            "case": "{case}",
            "codec": "{wire}",
            **_MEDIAN,
            "times as fast as plain": "{faster:.2f}",
        },
        key="results",
    ),
    Bench(
        "host",
        HostBench,
        _host,
        {
            "pass": "{pass}",
            "ranks": "{cp}",
            "version": "{cp_ring}",
            "host time of a hop, us": "{hop_us:.0f}",
        },
    ),
    Bench("rates", RatesBench, _rates, key=""),
    Bench(
        "lengths",
        LengthsBench,
        _lengths,
        {
            "split": "{layout}",
            "median s": "{median_s:.3f}",
            "over balanced": "{median_s_over_balanced:.2f}",
            "CPU s": "{cpu_s:.3f}",
            "CPU s over balanced": "{cpu_s_over_balanced:.2f}",
            "tokens": "{tokens:,}",
            "balance": "{balance:.2f}",
            "MB moved": lambda result: f"{result['bytes'] / 1e6:,.1f}",
        },
    ),
    Bench(
        "nodes",
        NodesBench,
        _nodes,
        {
            "shape": "{shape}",
            "MiB between nodes": lambda result: f"{result['bytes_between_nodes'] / 2**20:.1f}",
            "free wire, median s": "{free_s:.3f}",
            "slow wire, median s": "{median_s:.3f}",
            "min - max s": "{min_s:.3f} - {max_s:.3f}",
            "over direct": "{over_direct:.2f}",
        },
    ),
    Bench(
        "recurrent",
        RecurrentBench,
        _recurrent,
        {
            "": "{way}",
            "ranks": "{cp}",
            **_MEDIAN,
            "bytes": "{bytes:,}",
            "planned": "{planned_bytes:,}",
            "difference": "{difference:.1e}",
        },
    ),
    Bench("timing-cost", TimingCostBench, _timing_cost, key="results"),
)
"""All benches. A new one is a line here, its options and its function."""
