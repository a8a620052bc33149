"""`cp-ring bench`: what a bench is, how one is run and printed, and the benches that need no other
rank.

The modules of `cp_ring.tools.bench` are imported when a bench runs, so that help is quick.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, dataclass_transform

import typer

from cp_ring.errors import ConfigError
from cp_ring.tools.cli.option_models import (
    JSON,
    QuietCommand,
    QuietGroup,
    command,
    option,
    parse_tokens,
)

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


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Bench(ABC):
    """A command of `cp-ring bench`: the fields are its options, the docstring is its help.

    columns: of the table. key: that of the results in the JSON; "" prints the results alone.
    """

    columns: ClassVar[Mapping[str, Column]] = {}
    key: ClassVar[str] = "rows"

    as_json: bool = option(False, JSON, "--json")

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    @abstractmethod
    def measure(self) -> Measured:
        """Raises `ConfigError` for options that contradict each other or this machine."""


def commands(benches: Mapping[str, type[Bench]]) -> typer.Typer:
    """The command `cp-ring bench` with these benches, by name."""
    app = typer.Typer(cls=QuietGroup, no_args_is_help=True, help="Measure cp_ring on this machine.")
    for name, bench in benches.items():
        app.command(name, cls=QuietCommand, help=bench.__doc__)(command(bench, _run))
    return app


def _run(bench: Bench) -> None:
    """Measures, and prints what was measured, where and when."""
    from cp_ring.testing.network import NoNamespacesError
    from cp_ring.tools.bench.machine import facts

    try:
        measured = bench.measure()
    except NoNamespacesError as error:
        measured = Measured([{"skipped": str(error)}])
    about, results = facts(), measured.results
    if bench.as_json:
        whole = {**about, **measured.about, bench.key: results}
        typer.echo(json.dumps(whole if bench.key else measured.about or results))
    elif measured.lines:
        typer.echo("\n".join(measured.lines))
    else:
        _print(bench, measured, about)


def _print(bench: Bench, measured: Measured, about: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, results = Console(), measured.results
    if results and all("skipped" in result for result in results):
        console.print(f"not measured: {results[0]['skipped']}", soft_wrap=True)
        return
    table = Table(*bench.columns, title=measured.title)
    first, *others = bench.columns.values()
    for result in results:
        shown = [first, *(["{skipped}"] if "skipped" in result else others)]
        table.add_row(*(x.format_map(result) if isinstance(x, str) else x(result) for x in shown))
    console.print(table)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    console.print(
        f"{about['date']}; {about['machine']}, load {about['load']}; {versions}", soft_wrap=True
    )


def check(flag: str, value: str, known: Iterable[str]) -> None:
    """Raises `ConfigError` unless the value is one of the known ones."""
    if value not in known:
        raise ConfigError(f"{flag} {value}: it is {' or '.join(filter(None, known))}")


def check_device(device: str, otherwise: str) -> None:
    """Raises `ConfigError` where there is no such device; `otherwise` is what the CPU does."""
    import torch

    check("--device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: there is no CUDA device; --device cpu {otherwise}")


DTYPES = ("float32", "bfloat16", "float16")


class PlanBench(Bench):
    """Measure planning: time, memory, bytes on the wire and balance, each with its goal."""

    columns: ClassVar = {
        "": "{what}",
        "measured": "{measured:.3g} {unit}",
        "goal (at most)": lambda result: (
            f"{result['goal']:g} {result['unit']}" if result["goal"] else ""
        ),
    }
    key: ClassVar = ""

    repeats: int = option(5, "Each time is the best of this many.", min=1)

    def measure(self) -> Measured:
        from cp_ring.tools.bench import planning

        results = [result._asdict() for result in planning.run(self.repeats)]
        return Measured(results, "cp_ring planning")


def _accuracy_cell(name: str, result: Result) -> str:
    """A case that a kernel rejects has the reason in the first of the errors."""
    if name not in ("out", "dq", "dk", "dv"):
        return str(result.get(name, ""))
    if "rejected" in result:
        return result["rejected"] if name == "out" else ""
    return f"{result['error'][name]:.1e}" if "error" in result else f"{result[name]:.2f}"


class AccuracyBench(Bench):
    """Error of ring attention against float64, divided by the error of one call of the same kernel
    on the whole sequence.
    """

    columns: ClassVar = {
        name: partial(_accuracy_cell, name)
        for name in ("kernel", "dtype", "mask", "cp", "wire", "out", "dq", "dk", "dv")
    }

    seq_length: int = option(2048, "Tokens of the whole sequence.", min=1)
    heads: int = option(2, "Query heads.", min=1)
    kv_heads: int = option(1, "Key/value heads.", min=1)
    head_dim: int = option(64, "Size of a head.", min=1)
    kernel: list[str] | None = option(None, "As --cp-ring-kernel; repeatable. Default: cpu.")
    dtype: list[str] | None = option(None, "Repeatable. Default: float32, bfloat16.")
    cp: list[int] | None = option(None, "Ranks; repeatable. Default: 1, 2, 4, 8.", min=1)
    wire: list[str] | None = option(None, "As --cp-ring-wire; repeatable. Default: plain.")
    inputs: str = option(
        "normal", "normal, or outliers: a few channels of keys are 20 times larger."
    )
    seeds: int = option(5, "Random draws; the result is their mean.", min=1)
    device: str = option("cpu", "cuda or cpu.")

    def measure(self) -> Measured:
        from cp_ring.comm.codecs import CODECS, Quantized
        from cp_ring.kernels import REGISTRY
        from cp_ring.tools.bench.accuracy import INPUTS, AccuracyCases, run

        kernels, dtypes = self.kernel or ["cpu"], self.dtype or ["float32", "bfloat16"]
        wires, inputs = self.wire or ["plain"], self.inputs
        codecs = [name for name, codec in CODECS.items() if issubclass(codec, Quantized)]
        for flag, values, known in (
            ("--kernel", kernels, ["auto", *REGISTRY]),
            ("--dtype", dtypes, ["float16", "bfloat16", "float32", "float64"]),
            ("--wire", wires, ["plain", *codecs]),
            ("--inputs", [inputs], INPUTS),
            ("--device", [self.device], ["cpu", "cuda"]),
        ):
            for value in values:
                if value not in known:
                    raise ConfigError(f"{flag} {value}: unknown; known are {', '.join(known)}")
        check_device(self.device, "measures the kernels for the CPU")
        sizes = self.seq_length, self.heads, self.kv_heads, self.head_dim
        ranks = self.cp or [1, 2, 4, 8]
        cases = AccuracyCases(
            *sizes, kernels, dtypes, ranks, wires, inputs, self.seeds, self.device
        )
        return Measured(run(cases), "error, ring / one call; of a codec the error itself")


class ReplayBench(Bench):
    """Run every rank of a group in turn on one device: efficiency against one kernel call, without
    a network.
    """

    columns: ClassVar = {
        "cp": "{cp}",
        "kernel": "{kernel}",
        "forward": "{efficiency_forward:.3f}",
        "forward + backward": "{efficiency_both:.3f}",
        "slowest rank, ms": lambda result: f"{1e3 * result['slowest_both_s']:.1f}",
    }

    cp: list[int] | None = option(
        None, "Context-parallel size; repeatable. Default: 1, 2, 4, 8.", min=1
    )
    tokens: int = option(8192, "Tokens of one rank.", min=1)
    heads: int = option(32, "Query heads.", min=1)
    kv_heads: int = option(8, "Key/value heads.", min=1)
    head_dim: int = option(128, "Size of a head.", min=1)
    dtype: str = option("bfloat16", "bfloat16, float16 or float32.")
    device: str = option("cuda", "cuda or cpu.")
    kernel: str = option("auto", "As --cp-ring-kernel.")
    window: int = option(-1, "A query sees itself and this many keys before it; -1 for all.")
    document: int = option(0, "Average tokens of packed documents; 0 for one sequence.", min=0)
    layout: str = option("", "zigzag or balanced. Default: balanced with --document, else zigzag.")
    bandwidth: float = option(
        0.0, "GB per second of a simulated link, only with CUDA; 0 for none.", min=0
    )
    repeats: int = option(5, "Repetitions; the median is reported.", min=1)

    def measure(self) -> Measured:
        import torch

        from cp_ring.kernels import REGISTRY
        from cp_ring.plan import Mask
        from cp_ring.plan.plan import PlanSpec
        from cp_ring.tools.bench import samples
        from cp_ring.tools.bench.replay import RankSizes, efficiency

        check("--dtype", self.dtype, ("bfloat16", "float16", "float32"))
        check_device(self.device, "runs on the CPU")
        layout = self.layout or ("balanced" if self.document else "zigzag")
        check("--layout", layout, ("zigzag", "balanced"))
        check("--kernel", self.kernel, ("auto", *REGISTRY))
        size, window = self.head_dim, (self.window, 0)
        dtype = getattr(torch, self.dtype)
        sizes = RankSizes(self.tokens, self.heads, self.kv_heads, size, size, dtype, self.device)
        results = []
        for ranks in self.cp or [1, 2, 4, 8]:
            n = ranks * self.tokens
            mask = Mask.causal(n, window)
            if self.document:
                mask = Mask.documents(samples.exponential(n, self.document, 0), window=window)
            results.append(
                efficiency(
                    PlanSpec(layout).build(mask, ranks),
                    sizes,
                    kernel=self.kernel,
                    repeats=self.repeats,
                    bandwidth=self.bandwidth * 1e9 or None,
                )
            )
        return Measured(results, "single-device replay, no network")


class HostBench(Bench):
    """Time what the host does in a hop beyond attention and messages: Python, merges, sums, views,
    the kernel's adapter.
    """

    columns: ClassVar = {
        "pass": "{pass}",
        "ranks": "{cp}",
        "version": "{cp_ring}",
        "host time of a hop, us": "{hop_us:.0f}",
    }

    repeats: int = option(100, "Calls of each pass that count.", min=1)
    against: Path | None = option(
        None, "A checkout of another version, measured in turn with this one.", metavar="FOLDER"
    )

    def measure(self) -> Measured:
        from cp_ring.tools.bench import host

        against = self.against
        if against is not None and not (against / "cp_ring" / "__init__.py").is_file():
            raise ConfigError(f"--against {against}: there is no cp_ring/__init__.py in it")
        return Measured(host.run(self.repeats, against), "causal, one source a hop, 4 heads, CPU")


class RatesBench(Bench):
    """Measure what this machine's kernel, memory and links do in a second: the rates that cp-ring
    plan assumes.
    """

    key: ClassVar = ""

    megabytes: int = option(32, "MiB of a message, and of a copy.", min=1, max=1024)
    repeats: int = option(5, "Runs of each measurement; the best counts.", min=1)

    def measure(self) -> Measured:
        from cp_ring.tools.bench import machine

        rates = machine.run(self.megabytes, self.repeats)
        link, flags = ", no second GPU for a link", ""
        if rates["link_gb_s"] is not None:
            link = ", link {link_gb_s:.3g} GB/s"
            flags = " --node-bandwidth {link_gb_s:.3g}"
        lines = (
            "{device}, kernel {kernel}: {tflops:.3g} TFLOP/s, {call_us:.3g} us a call, memory "
            "{memory_gb_s:.3g} GB/s" + link,
            "cp-ring plan --tflops {tflops:.3g}" + flags + " ...",
        )
        shown = tuple(line.format_map(rates) for line in lines)
        return Measured([], about=machine.facts() | rates, lines=shown)


class TimingCostBench(Bench):
    """
    Measure what --cp-ring-timing costs: in steps that are recorded, and in steps that are not.
    """

    key: ClassVar = "results"

    tokens: int = option(512, "Tokens of a rank.", parser=parse_tokens, metavar="TOKENS")
    repeats: int = option(40, "Pairs of calls.", min=1)

    def measure(self) -> Measured:
        from cp_ring.tools.bench import timing_cost

        tokens = self.tokens
        if tokens < 8 or tokens % 2:
            raise ConfigError(f"--tokens {tokens}: at least 8 tokens, an even number, are needed")
        results = timing_cost.run(tokens, self.repeats)
        line = "{what}: {cost:.3%} of a call of {call_ms:.1f} ms"
        lines = tuple(line.format_map(result) for result in results)
        return Measured(results, about={"tokens": tokens}, lines=lines)
