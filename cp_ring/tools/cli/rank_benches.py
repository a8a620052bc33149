"""The benches of `cp-ring bench` whose ranks exchange messages."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from cp_ring.errors import ConfigError
from cp_ring.tools.cli.bench import DTYPES, Bench, Column, Measured, check
from cp_ring.tools.cli.option_models import option, parse_tokens

_TIMES: dict[str, Column] = {
    "median s": "{median_s:.3f}",
    "min - max s": "{min_s:.3f} - {max_s:.3f}",
}
_WORDS = {2: "two", 4: "four"}


def _heads(default: int = 8, text: str = "Heads of queries, keys and values.") -> Any:
    return option(default, text, min=1)


def _head_dim() -> Any:
    return option(64, "Size of a head.", min=1)


def _check_chunks(n: int, ranks: int) -> None:
    if n % (2 * ranks):
        raise ConfigError(
            f"--seq-length {n} does not divide by {2 * ranks}, the chunks of {_WORDS[ranks]} ranks"
        )


def _check_heads(heads: int, ranks: int) -> None:
    if heads % ranks:
        raise ConfigError(
            f"--heads {heads}: {_WORDS[ranks]} ranks exchange heads, so it must divide by {ranks}"
        )


def _check_above_0(flag: str, *values: float) -> None:
    for value in values:
        if not value > 0:
            raise ConfigError(f"{flag} {value:g} must be above 0")


class AttentionBench(Bench):
    """Time causal ring attention, forward and backward, beside one rank and beside other packages
    that are installed.

    Packages on the CPU: pip install ring-attention-pytorch ringattention; on CUDA: ring-flash-attn,
    transformer-engine[pytorch].
    """

    columns: ClassVar = {
        "": "{name}",
        "median s": "{median_s:.2f}",
        "min - max s": "{min_s:.2f} - {max_s:.2f}",
        "over cp_ring": lambda result: (
            f"{result['over_cp_ring']:.2f}" if result["over_cp_ring"] else ""
        ),
        "error": "{error:.1e}",
    }

    seq_length: int = option(8192, "Tokens of the whole sequence.", min=1)
    cp: int = option(2, "Ranks; on the CPU each has one thread.", min=1)
    heads: int = _heads()
    head_dim: int = _head_dim()
    dtype: str = option(
        "", "float32, bfloat16 or float16. Default: float32 on the CPU, bfloat16 on CUDA."
    )
    device: str = option("cpu", "cpu, or cuda with one GPU per rank.")
    repeats: int = option(5, "Rounds; each contestant runs once per round.", min=1)
    only: list[str] | None = option(None, "A contestant; repeatable. Default: all.")

    def measure(self) -> Measured:
        from cp_ring.tools.bench.contestants import CONTESTANTS, Contest, run

        device, cp, n = self.device, self.cp, self.seq_length
        check("--device", device, ("cpu", "cuda"))
        check("--dtype", self.dtype, ("", *DTYPES))
        _check_gpus(device, cp)
        names = self.only or [name for name, one in CONTESTANTS.items() if device in one.devices]
        for name in names:
            if name not in CONTESTANTS:
                raise ConfigError(
                    f"--only {name}: no such contestant; there are {', '.join(CONTESTANTS)}"
                )
            if device not in CONTESTANTS[name].devices:
                raise ConfigError(f"--only {name}: it does not run with --device {device}")
        if n % (2 * cp):
            raise ConfigError(f"--seq-length {n} does not divide by 2 * --cp {cp}")
        dtype = self.dtype or {"cpu": "float32", "cuda": "bfloat16"}[device]
        contest = Contest(n, cp, self.heads, self.head_dim, dtype, device)
        results = run(contest, names, self.repeats)
        of_ring = next((one.get("median_s") for one in results if one["name"] == "cp_ring"), None)
        for result in results:
            if "skipped" not in result:
                result["over_cp_ring"] = result["median_s"] / of_ring if of_ring else None
        return Measured(results, f"causal, {n} x {self.heads} x {self.head_dim}, {cp} ranks")


def _check_gpus(device: str, ranks: int) -> None:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if device == "cuda" and (not gpus or (gpus < ranks and not shared)):
        raise ConfigError(
            f"--device cuda: --cp {ranks} ranks need a CUDA device each, there are {gpus}; bench "
            "replay runs them on one"
        )


class OverlapBench(Bench):
    """Time forward and backward on two CPU ranks with a throttled link between them: how much
    communication is exposed.

    Needs root, for network namespaces. Where it cannot make them, it prints why and measures
    nothing. Default ratios: 0.5, 0.9.
    """

    columns: ClassVar = {
        "transfer / compute of a hop": lambda result: (
            f"{result['ratio']:g}" if result["ratio"] else "free wire"
        ),
        "of them, ms": lambda result: (
            f"{1e3 * result['transfer_s']:.0f} / {1e3 * result['hop_s']:.0f}"
        ),
        "step, median s": "{median_s:.3f}",
        "min - max s": "{min_s:.3f} - {max_s:.3f}",
        "exposed": "{exposed:.1%}",
    }

    seq_length: int = option(8192, "Tokens of the whole sequence, on two ranks.", min=1)
    heads: int = _heads()
    head_dim: int = _head_dim()
    ratio: list[float] | None = option(
        None,
        "Time of a full shard on the wire, divided by the time that a hop computes; repeatable.",
    )
    repeats: int = option(7, "Rounds; each wire runs once per round.", min=1)

    def measure(self) -> Measured:
        from cp_ring.tools.bench.contestants import Contest
        from cp_ring.tools.bench.overlap import run

        n, ratios = self.seq_length, self.ratio or [0.5, 0.9]
        _check_chunks(n, 2)
        _check_above_0("--ratio", *ratios)
        results = run(Contest(n, 2, self.heads, self.head_dim), ratios, self.repeats)
        sizes = f"{n} x {self.heads} x {self.head_dim}"
        return Measured(results, f"causal, {sizes}, 2 ranks, throttled link")


class WireBench(Bench):
    """Time forward and backward with each codec on two CPU ranks with a throttled link between
    them.

    Needs root, for network namespaces. Where it cannot make them, it prints why and measures
    nothing.
    """

    columns: ClassVar = {
        "case": "{case}",
        "codec": "{wire}",
        **_TIMES,
        "times as fast as plain": "{faster:.2f}",
    }
    key: ClassVar = "results"

    seq_length: int = option(4096, "Tokens of the whole sequence, on two ranks.", min=1)
    ratio: float = option(
        3.0, "Time of plain's messages on the wire, divided by its time on the free wire."
    )
    repeats: int = option(5, "Rounds; each codec runs once per round.", min=1)

    def measure(self) -> Measured:
        from cp_ring.tools.bench.slow_wire import run

        n, ratio = self.seq_length, self.ratio
        _check_chunks(n, 2)
        _check_above_0("--ratio", ratio)
        title = f"causal, {n} tokens, 2 ranks, float32, a wire on which plain takes {ratio:g} x"
        return Measured(run(n, ratio, self.repeats), title)


class LengthsBench(Bench):
    """Time attention and a token-wise layer on documents of a long-tailed set: balanced, zigzag,
    padded, independent ranks, Megatron's dynamic groups of ranks.
    """

    columns: ClassVar = {
        "split": "{layout}",
        "median s": "{median_s:.3f}",
        "over balanced": "{median_s_over_balanced:.2f}",
        "CPU s": "{cpu_s:.3f}",
        "CPU s over balanced": "{cpu_s_over_balanced:.2f}",
        "tokens": "{tokens:,}",
        "balance": "{balance:.2f}",
        "MB moved": lambda result: f"{result['bytes'] / 1e6:,.1f}",
    }

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
    repeats: int = option(7, "Rounds; each split runs once per round.", min=1)
    seed: int = option(0, "Seed of random lengths.", min=0)

    def measure(self) -> Measured:
        from cp_ring.tools.bench import samples
        from cp_ring.tools.bench.lengths import LAYOUTS, PackedWork, long_tail, run, shares

        n, cp, seed = self.seq_length, self.cp, self.seed
        if n < 128 * cp:
            raise ConfigError(f"--seq-length {n}: {cp} ranks need at least {128 * cp} tokens")
        drawn = samples.lengths(self.lengths, n, seed) if self.lengths else long_tail(n, seed)
        work = PackedWork(tuple(drawn.tolist()), cp, self.heads, self.head_dim)
        names, skipped = list(LAYOUTS), []
        try:
            shares(work, "dynamic")
        except ConfigError as error:  # without Megatron, or where its scheduler fails
            names.remove("dynamic")
            skipped = [{"layout": "dynamic", "skipped": str(error)}]
        results = run(work, names, self.repeats)
        for result in results:
            for name in ("median_s", "cpu_s"):
                result[f"{name}_over_balanced"] = result[name] / results[0][name]
        about = {"documents": len(drawn), "longest": int(drawn.max())}
        title = (
            f"{len(drawn)} documents, {drawn.sum():,} tokens, the longest {drawn.max():,}; {cp} "
            "ranks"
        )
        return Measured(results + skipped, title, about)


class NodesBench(Bench):
    """Time forward and backward on two nodes of two CPU ranks each with a slow link between the
    nodes: direct, relay and heads.

    Needs root, for network namespaces, which are the nodes. Where it cannot make them, it prints
    why and measures nothing.
    """

    columns: ClassVar = {
        "shape": "{shape}",
        "MiB between nodes": lambda result: f"{result['bytes_between_nodes'] / 2**20:.1f}",
        "free wire, median s": "{free_s:.3f}",
        "slow wire, median s": "{median_s:.3f}",
        "min - max s": "{min_s:.3f} - {max_s:.3f}",
        "over direct": "{over_direct:.2f}",
    }

    seq_length: int = option(4096, "Tokens of the whole sequence, on four ranks.", min=1)
    heads: int = _heads()
    head_dim: int = _head_dim()
    share: float = option(
        0.5, "Speed of the link, as a share of what hiding the transfers of direct would need."
    )
    full: bool = option(False, "A full mask instead of a causal one.", "--full")
    repeats: int = option(5, "Rounds; each shape runs once per round.", min=1)

    def measure(self) -> Measured:
        from cp_ring.tools.bench.contestants import Contest
        from cp_ring.tools.bench.two_nodes import run

        n, heads, size = self.seq_length, self.heads, self.head_dim
        _check_chunks(n, 4)
        _check_heads(heads, 2)
        _check_above_0("--share", self.share)
        results = run(Contest(n, 4, heads, size), self.repeats, self.share, self.full)
        speed = f"{results[0].get('bytes_per_s', 0) / 1e6:.3g} MB/s between them"
        mask = "full" if self.full else "causal"
        return Measured(results, f"{mask}, {n} x {heads} x {size}, 2 nodes of 2 ranks, {speed}")


class RecurrentBench(Bench):
    """
    Time a gated delta net layer on 2 and 4 ranks, which exchange tokens for heads, or pass states.
    """

    columns: ClassVar = {
        "": "{way}",
        "ranks": "{cp}",
        **_TIMES,
        "bytes": "{bytes:,}",
        "planned": "{planned_bytes:,}",
        "difference": "{difference:.1e}",
    }

    seq_length: int = option(
        4096, "Tokens of the sequence.", parser=parse_tokens, metavar="TOKENS", min=1
    )
    heads: int = _heads(8, "Heads of keys and values.")
    head_dim: int = _head_dim()
    repeats: int = option(5, "Rounds.", min=1)

    def measure(self) -> Measured:
        from cp_ring.tools.bench.recurrent_ways import DeltaNet, run

        n, heads, size = self.seq_length, self.heads, self.head_dim
        _check_chunks(n, 4)
        _check_heads(heads, 4)
        results = run([DeltaNet(n, cp, heads, size, size) for cp in (2, 4)], self.repeats)
        return Measured(results, f"gated delta net, {n} x {heads} x {size}, float32, zigzag")
