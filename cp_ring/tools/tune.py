"""`cp-ring tune`: finds the fastest sizes of all parallel dimensions for a job on a number of GPUs,
by the model in `cp_ring.tools.tune_model`, among those that Megatron accepts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
import yaml

from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.layout import LAYOUTS
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.sizes.device_rates import running
from cp_ring.plan.sizes.head_split import unsplit
from cp_ring.plan.time import Conditions
from cp_ring.tools import job as jobs
from cp_ring.tools.job import JobConfig
from cp_ring.tools.lengths import packed_rows
from cp_ring.tools.terminal import (
    DEFAULT_DEVICE,
    JOB,
    AsJson,
    Device,
    Overrides,
    choose_for,
    emit,
)
from cp_ring.tools.tune_model import (
    EXPOSED,
    RECOMPUTE,
    RESERVED_BYTES,
    AttentionCost,
    ParallelSizes,
    TrainingSetup,
    model_sizes,
    step_memory,
    step_seconds,
)

BEST, MOST_ASKED = 5, 40
"""Ways that are shown, and of which Megatron is asked at most."""

MAX_RANKS = 256
"""Context-parallel ranks at most: plans of more take seconds to predict."""

SURE = 0.05
"""Predicted steps that differ by less may be in another order when they are measured."""

DOCUMENTS = "lognormal:4000"
"""Lengths of documents, where a job packs documents and nothing says how long."""

_DEFAULT_VOCABULARY = 128_256
# as the number of ranks that exchange heads
_SAYS_THE_SAME = ("cp_comm_type", "hierarchical_context_parallel_sizes")
_RECOMPUTE = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)


@dataclass(frozen=True)
class Request:
    """The search that is asked for. lengths: the documents of a batch row, as `--lengths` describes
    them; None for the job's own. tp, cp, pp: sizes that are given; None is searched.
    """

    gpus: int
    ranks_per_node: int = 8
    memory: float = 80e9
    lengths: str | None = None
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None


class Way(NamedTuple):
    """One way to run the job. seconds: of a step, by item. memory: bytes of a rank, by item."""

    sizes: ParallelSizes
    recompute: str
    attention: AttentionCost
    seconds: dict[str, float]
    memory: dict[str, float]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def exposed(self) -> float:
        """Seconds of a step that wait for messages."""
        return sum(self.seconds.get(name, 0.0) for name in EXPOSED)

    @property
    def bytes(self) -> float:
        """Bytes of a rank."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class TuneResult:
    """The best ways to run a job, the fastest first, each with its job; and what led to them.

    rejected: names of ways that are faster but that Megatron rejects, with its words. by_cp: the
    fastest way of each context-parallel size that fits.
    """

    best: list[tuple[Way, JobConfig]]
    rejected: list[tuple[str, str]]
    by_cp: dict[int, Way]
    assumptions: list[str]
    setup: TrainingSetup


def tune_command(
    job: Annotated[str, typer.Argument(help=JOB, metavar="JOB")],
    gpus: Annotated[int, typer.Option(help="GPUs of the job.", min=1)],
    overrides: Overrides = None,
    ranks_per_node: Annotated[int, typer.Option(help="GPUs of a node.", min=1)] = 8,
    device: Device = DEFAULT_DEVICE,
    memory: Annotated[float, typer.Option(help="GB of a GPU.", min=1, metavar="GB")] = 80,
    lengths: Annotated[
        str | None,
        typer.Option(help="Documents: a file of lengths, or lognormal:MEAN."),
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel size; searched.")] = None,
    cp: Annotated[int | None, typer.Option(help="Context parallel size; searched.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline parallel size; searched.")] = None,
    write: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write the best configuration.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest ways to run a job on these GPUs. All times are predicted, without a GPU."""
    if gpus > ranks_per_node and gpus % ranks_per_node:
        raise PlanError(f"--gpus {gpus} is not a multiple of --ranks-per-node {ranks_per_node}")
    node = min(ranks_per_node, gpus)
    choose_for(device)
    request = Request(gpus, node, memory * 1e9, lengths, tp, cp, pp)
    result = tune(jobs.load(job, overrides or []), request)
    title = f"{job} on {gpus} GPUs, rates of {device}: predicted, not measured"
    emit(facts(result), as_json, lambda: _print(result, title))
    if write:
        way, chosen = result.best[0]
        text = (
            f"# Made by cp-ring tune from {job}. The times that chose it are predicted, not "
            f"measured.\n{yaml.safe_dump(chosen.settings, sort_keys=False)}"
        )
        try:
            Path(write).write_text(text)
        except OSError as error:
            raise ConfigError(f"--write {write}: cannot write: {error.strerror}") from None
        typer.echo(f"wrote {write}: {way.sizes.name}", err=as_json)


def tune(job: JobConfig, request: Request) -> TuneResult:
    """Predict all ways to run the job, and ask Megatron about the fastest until it has accepted
    five.

    Raises `ConfigError` or `PlanError` with one line where there is no way: it names the option or
    the key.
    """
    from cp_ring.tools import megatron_flags

    packs = job.cp_ring.document_mask or any(job.megatron.get(key) for key in jobs.PACKED_DATA)
    lengths = request.lengths or (DOCUMENTS if packs else None)
    cp_ring = {"enabled": True} | ({"document_mask": True} if lengths and not packs else {})
    job = _changed(job, cp_ring=cp_ring)
    parser = megatron_flags.build_parser()
    args = _arguments(_alone(job), parser)
    setup = _setup(job, args, request)
    masks = layer_masks(setup, lengths)
    sizes = possible_sizes(setup, request)
    ways = search(setup, masks, sizes, job.cp_ring.layout)
    if not ways:
        raise ConfigError(_nothing_fits(setup, sizes))
    accepted, rejected = _accepted(job, request, ways, parser)
    if not accepted:
        name, line = rejected[0]
        raise ConfigError(
            f"Megatron rejects the sizes of all {len(rejected)} fastest jobs; {name}: {line}"
        )
    by_cp = {way.sizes.cp: way for way in reversed(ways)}
    notes = [*_notes(setup, job, args, lengths)]
    return TuneResult(accepted, rejected, dict(sorted(by_cp.items())), notes, setup)


def _undivided(setup: TrainingSetup) -> str:
    """Return the nearest lengths that context-parallel ranks can split, if they cannot split the
    job's, else "".
    """
    n, unit = setup.seq_length, 2 * setup.gpus
    if n % 4 == 0:  # context parallel size 2 cuts a batch row into 4 chunks
        return ""
    lower = n - n % unit
    return (
        f"context-parallel ranks cannot split {n:,} tokens, but they can split "
        f"megatron.seq_length={lower or unit} or {lower + unit}"
    )


def _nothing_fits(setup: TrainingSetup, sizes: Sequence[ParallelSizes]) -> str:
    """Return the line that names the sizes that need least memory, and what needs it."""
    least = min(sizes, key=lambda one: sum(least_memory(setup, one).values()))
    items = least_memory(setup, least)
    parts = sorted(items.items(), key=lambda item: -item[1])[:3]
    shown = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts)
    advice = _undivided(setup) or "take more --gpus or a shorter megatron.seq_length"
    return (
        f"--memory {setup.memory / 1e9:g}: nothing fits; {least.name} needs least, "
        f"{sum(items.values()) / 1e9:.1f} GB without attention's buffers ({shown}): {advice}"
    )


def _accepted(
    job: JobConfig, request: Request, ways: Sequence[Way], parser: argparse.ArgumentParser
) -> tuple[list[tuple[Way, JobConfig]], list[tuple[str, str]]]:
    """Return the fastest ways that Megatron accepts, and the reasons why it rejects others."""
    from cp_ring.megatron.validation import rejection

    accepted: list[tuple[Way, JobConfig]] = []
    rejected: list[tuple[str, str]] = []
    for way in ways[:MOST_ASKED]:
        try:
            chosen = configured(job, way)
            problem = rejection(_arguments(chosen, parser), request.gpus)
        except ConfigError as error:
            problem = "; ".join(error.args)
        if problem:
            rejected.append((way.sizes.name, problem))
        else:
            accepted.append((way, chosen))
        if len(accepted) == BEST:
            break
    return accepted, rejected


def _arguments(job: JobConfig, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return what Megatron's parser reads from the flags of a job, checked by cp_ring."""
    device = "cpu" if job.launch.device == "cpu" else "cuda"
    return jobs.megatron_flags(job, jobs.find_corpus(job), device, parser)[1]


def _changed(job: JobConfig, **sections: Any) -> JobConfig:
    """Return the job with other values of some keys; None removes a key of section megatron."""
    settings = job.settings | {
        name: job.settings.get(name, {}) | changes for name, changes in sections.items()
    }
    given = settings.get("megatron", {})
    settings["megatron"] = {key: value for key, value in given.items() if value is not None}
    return jobs.validate(settings, "cp-ring tune")


def _alone(job: JobConfig) -> JobConfig:
    """Return the job on one rank, whose arguments have the sizes of the model."""
    one = dict.fromkeys(jobs.SPLITS, 1)
    simple = {"heads": 1, "route": "direct", "schedule": "auto", "wire": "auto"}
    absent = dict.fromkeys((*_SAYS_THE_SAME, "sequence_parallel"))
    return _changed(job, megatron=absent | one, launch={"ranks": 1}, cp_ring=simple)


def configured(job: JobConfig, way: Way) -> JobConfig:
    """Return the job that runs this way."""
    sizes, attention = way.sizes, way.attention
    again = way.recompute != "none"
    megatron: dict[str, Any] = dict.fromkeys((*_SAYS_THE_SAME, *_RECOMPUTE))
    if again:
        megatron |= zip(_RECOMPUTE, ("full", "uniform", 1), strict=False)
    local = job.megatron.get("transformer_impl") == "local"
    shared = bool(job.megatron.get("sequence_parallel")) or not local
    megatron["sequence_parallel"] = sizes.tp > 1 and shared
    if job.megatron.get("num_experts") and sizes.tp > 1:
        experts = job.megatron.get("expert_tensor_parallel_size") or 1
        megatron["expert_tensor_parallel_size"] = experts
    megatron |= zip(jobs.SPLITS, (sizes.tp, sizes.pp, sizes.cp), strict=True)
    cp_ring = {
        "heads": attention.heads,
        "route": "direct",
        "schedule": "auto",
        "wire": attention.wire,
        "recompute": way.recompute if again else job.cp_ring.recompute,
    }
    launch = {"ranks": math.prod(sizes)}
    return _changed(job, megatron=megatron, launch=launch, cp_ring=cp_ring)


def _setup(job: JobConfig, args: argparse.Namespace, request: Request) -> TrainingSetup:
    """Return the setup that is searched."""
    from cp_ring.megatron.flags.resolve import windows_of

    if not args.seq_length or not args.global_batch_size:
        raise ConfigError("cp-ring tune needs megatron.seq_length and megatron.global_batch_size")
    if args.save and not args.save_interval:
        raise ConfigError("give megatron.save_interval, the steps from one checkpoint to the next")
    unit, size = args.make_vocab_size_divisible_by, _vocabulary(job, args) or _DEFAULT_VOCABULARY
    windows = windows_of(args) or ()
    return TrainingSetup(
        model=model_sizes(args, windows, -(-(size + 1) // unit) * unit),
        seq_length=args.seq_length,
        global_batch=args.global_batch_size,
        micro_batch=args.micro_batch_size or 1,
        gpus=request.gpus,
        ranks_per_node=request.ranks_per_node,
        rates=running(),
        memory=request.memory,
        overlap=bool(args.overlap_grad_reduce),
        distributed=bool(args.use_distributed_optimizer),
        shared_norms=bool(job.megatron.get("sequence_parallel"))
        or args.transformer_impl == "transformer_engine",
    )


def _vocabulary(job: JobConfig, args: argparse.Namespace) -> int | None:
    if jobs.uses_corpus(job):
        return job.data.vocab_size
    return getattr(args, "padded_vocab_size", None) or args.vocab_size


def _notes(
    setup: TrainingSetup, job: JobConfig, args: argparse.Namespace, lengths: str | None
) -> Iterator[str]:
    """Return the assumptions of the predictions, a line each."""
    rates, experts = setup.rates, setup.model.experts
    yield (
        f"a rank computes {rates.forward / 1e12:.3g} TFLOP/s in attention, "
        f"{rates.backward / 1e12:.3g} in backward and {rates.products / 1e12:.3g} in matrix "
        "products, moves "
        f"{rates.memory / 1e9:,.0f} GB/s in memory, {rates.inside / 1e9:.3g} GB/s inside a node of "
        f"{setup.ranks_per_node} and {rates.between / 1e9:.3g} GB/s between nodes"
    )
    if not _vocabulary(job, args):
        yield f"a vocabulary of {_DEFAULT_VOCABULARY:,}: the configuration names none"
    if lengths:
        yield f"documents: {lengths}, packed into {setup.seq_length:,} tokens"
    yield (
        "weights of all matrices, without norms and biases; the optimizer's states are shared by "
        "data- and context-parallel ranks"
    )
    yield f"{RESERVED_BYTES / 1e9:.1f} GB of each device for CUDA, NCCL and fragmentation"
    yield "messages of tensor and expert parallelism are not hidden" + (
        f"; experts stay divided among {experts.parallel} ranks, and tokens fall on them evenly"
        if experts
        else ""
    )
    yield "data loading, evaluation and checkpoints take no time"
    if getattr(args, "mtp_num_layers", None):
        yield "layers of multi-token prediction are left out"


LayerMasks = Sequence[tuple[Mask, int]]
"""The masks of a batch row, and the number of layers that have each."""


def layer_masks(setup: TrainingSetup, lengths: str | None = None) -> LayerMasks:
    """Return the masks of the layers for a batch row: causal, or documents of these lengths."""
    n = setup.seq_length
    ends = packed_rows(lengths, n)[0][0] if lengths else [0, n]
    return [(Mask.documents(ends, window=w, n=n), count) for w, count in setup.model.windows]


def search(
    setup: TrainingSetup, masks: LayerMasks, sizes: Sequence[ParallelSizes], layout: str
) -> list[Way]:
    """Return the ways to run the job that fit into memory, the fastest first: each of these sizes
    with its best attention, and with as little recomputation as memory allows.
    """
    costs: dict[tuple[int, int], list[AttentionCost]] = {}
    plans: dict[tuple[int, int], list[tuple[Plan, int]]] = {}

    def best(one: ParallelSizes) -> Way | None:
        for recompute in RECOMPUTE:
            if sum(step_memory(setup, one, recompute, None).values()) > setup.memory:
                continue
            key = one.tp, one.cp
            if key not in costs:
                costs[key] = attention_costs(setup, masks, *key, layout, plans)
            for cost in costs[key]:
                items = step_memory(setup, one, recompute, cost)
                if sum(items.values()) <= setup.memory:
                    seconds = step_seconds(setup, one, recompute, cost.seconds)
                    return Way(one, recompute, cost, seconds, items)
        return None

    return sorted(filter(None, map(best, sizes)), key=lambda way: way.step)


def least_memory(setup: TrainingSetup, sizes: ParallelSizes) -> dict[str, float]:
    """Return the bytes by item that these sizes need at least, without attention's buffers."""
    ways = (step_memory(setup, sizes, recompute, None) for recompute in RECOMPUTE)
    return min(ways, key=lambda items: sum(items.values()))


def attention_costs(
    setup: TrainingSetup,
    masks: LayerMasks,
    tp: int,
    cp: int,
    layout: str,
    plans: dict[tuple[int, int], list[tuple[Plan, int]]],
) -> list[AttentionCost]:
    """Return the costs of attention in each way that these sizes allow, the fastest first: the
    ring, latents, or heads over the ranks of a node. plans: those made so far, by ranks and heads.
    """
    from cp_ring.memory import memory  # which loads torch

    model = setup.model
    near = gcd(cp, max(1, setup.ranks_per_node // tp))
    layer = model.attention(tp, 1)
    ways = [(1, "plain"), *([(1, "latent")] if model.latent and cp > 1 else [])]
    if near > 1 and not unsplit(layer.heads, layer.kv_heads, near):
        ways.append((near, "plain"))
    costs = []
    for heads, wire in ways:
        if (cp, heads) not in plans:
            spec = PlanSpec(LAYOUTS[layout].of_layers(masks, cp), ulysses=heads)
            made = [(spec.build(mask, cp), count) for mask, count in masks]
            for plan, _ in made:
                plan.verify()
            plans[cp, heads] = made
        sizes = model.attention(tp, setup.micro_batch, wire)
        total, buffers = np.zeros(4), []
        for plan, count in plans[cp, heads]:
            time = plan.time(Conditions(sizes, setup.rates, near))
            total += count * np.array([time.forward, time.both, *time.waits])
            buffers.append(_amounts(memory(plan, sizes)))
        seconds = tuple(total.tolist())
        costs.append(AttentionCost(heads, wire, seconds, *map(max, zip(*buffers, strict=True))))
    return sorted(costs, key=lambda cost: cost.seconds[1])


def _amounts(buffers: dict[str, int]) -> tuple[int, int, int, int]:
    """Return four numbers of bytes: all that is kept, out and lse among it, receive buffers, and
    the other buffers when they are most.
    """
    kept = sum(size for name, size in buffers.items() if name.startswith("kept"))
    slots = buffers["keys and values: slots"]
    results = buffers["gradient of out"] + buffers["kept: lse"]
    return kept, results, slots, sum(buffers.values()) - kept - slots


def possible_sizes(setup: TrainingSetup, request: Request) -> list[ParallelSizes]:
    """Return the sizes whose product is the number of GPUs, and that divide heads, layers, sequence
    and global batch.

    Tensor-parallel ranks share a node. Raises `PlanError` where there are none.
    """
    given = {"tp": request.tp, "cp": request.cp, "pp": request.pp}
    for name, size in given.items():
        if size is not None and (size < 1 or setup.gpus % size):
            raise PlanError(f"--{name} {size}: it does not divide the {setup.gpus} GPUs of --gpus")
    divisors = [size for size in range(1, setup.gpus + 1) if setup.gpus % size == 0]
    tried = [divisors if size is None else [size] for size in given.values()]
    model, parallel = setup.model, setup.model.experts.parallel if setup.model.experts else 1
    possible = []
    for tp, cp, pp in product(*tried):
        if setup.gpus % (tp * cp * pp) or tp > setup.ranks_per_node or cp > MAX_RANKS:
            continue
        dp, n = setup.gpus // (tp * cp * pp), setup.seq_length
        if (
            model.heads % tp == 0
            and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)
            and (cp == 1 or n % (2 * cp) == 0)
            and n // cp % tp == 0
            and all(sizes.units % tp == 0 for sizes, _ in model.recurrent)
            and (setup.gpus // pp) % parallel == 0
            and model.layers % pp == 0
            and setup.global_batch % (dp * setup.micro_batch) == 0
        ):
            possible.append(ParallelSizes(tp, cp, pp, dp))
    if not possible:
        kinds = ", ".join(f"{name} {size}" for name, size in given.items() if size)
        hint = f"; {line}" if (line := _undivided(setup)) else ""
        raise PlanError(
            f"--gpus {setup.gpus}: no sizes of tp, cp, pp and dp{f' with {kinds}' if kinds else ''}"
            f" have this product and divide {model.heads} heads, {setup.seq_length:,} tokens, "
            f"{model.layers} layers and a global batch of {setup.global_batch} in microbatches of "
            f"{setup.micro_batch}"
            + (f", with experts over {parallel} ranks" if parallel > 1 else "")
            + hint
        )
    return possible


def reasons(result: TuneResult) -> list[str]:
    """Return why the best way won, a line each: against the next one, and against half and twice
    its context-parallel size.
    """
    best, *others = [way for way, _ in result.best]
    cp = best.sizes.cp
    lines = [
        f"Megatron rejects {name}, which is faster: {reason}"
        for name, reason in result.rejected[:3]
    ]
    if others:
        lines.append(f"the next, {others[0].sizes.name}: {_difference(best, others[0])}")
    shown = (best, *others[:1])
    near = [result.by_cp[size] for size in (cp // 2, 2 * cp) if size in result.by_cp]
    lines += [
        f"cp {way.sizes.cp} at best, {way.sizes.name}: {_difference(best, way)}"
        for way in near
        if way not in shown
    ]
    if best.recompute != "none":
        lines.append("without recomputation it does not fit")
    if close := sum(other.step < (1 + SURE) * best.step for other in others):
        lines.append(
            f"within {SURE:.0%} of it: {close} of the others, which the model cannot tell apart "
            "for sure"
        )
    return lines


def _difference(best: Way, other: Way) -> str:
    """Return how much slower the other way is, and the items in which they differ most."""
    names = dict.fromkeys([*other.seconds, *best.seconds])
    changes = {name: other.seconds.get(name, 0.0) - best.seconds.get(name, 0.0) for name in names}
    shown = [
        f"{name} {changes[name]:+.3g} s"
        for name in sorted(changes, key=lambda name: -abs(changes[name]))[:3]
        if abs(changes[name]) > 1e-3 * best.step
    ]
    return f"{other.step / best.step - 1:.1%} slower" + (f" ({', '.join(shown)})" if shown else "")


def facts(result: TuneResult) -> dict[str, Any]:
    """Return the result, ready for JSON. Times are predicted seconds, sizes are bytes."""
    return {
        "best": [_way(result, way) for way, _ in result.best],
        "by_cp": {cp: _way(result, way) for cp, way in result.by_cp.items()},
        "reasons": reasons(result),
        "rejected": [{"sizes": sizes, "reason": reason} for sizes, reason in result.rejected],
        "assumptions": result.assumptions,
    }


def _way(result: TuneResult, way: Way) -> dict[str, Any]:
    tokens = result.setup.global_batch * result.setup.seq_length
    return {
        **way.sizes._asdict(),
        "heads": way.attention.heads,
        "wire": way.attention.wire,
        "recompute": way.recompute,
        "tokens_per_s_per_gpu": tokens / way.step / result.setup.gpus,
        "exposed_s": way.exposed,
        "step_s": way.step,
        "seconds": way.seconds,
        "bytes": way.bytes,
        "memory": way.memory,
    }


def _print(result: TuneResult, title: str) -> None:
    ways = [_way(result, way) for way, _ in result.best]
    names = [name for name, value in ways[0].items() if not isinstance(value, dict)]
    shown = {"tokens_per_s_per_gpu": "tokens/s/GPU", "exposed_s": "exposed, s"}
    rows = [
        (shown.get(name, name), [way[name] for way in ways])
        for name in names
        if name not in ("step_s", "bytes")
    ]
    for header, total, items, unit in (
        ("step, s", "step_s", "seconds", 1.0),
        ("memory, GB", "bytes", "memory", 1e9),
    ):
        rows.append((header, [way[total] / unit for way in ways]))
        kinds = dict.fromkeys(item for way in ways for item in way[items])
        rows += [(f"  {x}", [way[items].get(x, 0.0) / unit for way in ways]) for x in kinds]
    typer.echo(title)
    for name, values in rows:
        cells = (f"{x:,.2f}" if isinstance(x, float) else str(x) for x in values)
        typer.echo(f"{name:<32}" + "".join(f"{cell:>9}" for cell in cells))
    best = result.best[0][0]
    for head, lines in (
        (f"Why {best.sizes.name}:", reasons(result)),
        ("Assumed:", result.assumptions),
    ):
        typer.echo("\n".join([head, *(f"- {line}" for line in lines)]))
