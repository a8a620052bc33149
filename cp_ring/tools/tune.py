"""`cp-ring tune`: finds the fastest sizes of all parallel dimensions for a job on a number of GPUs,
by the model in `cp_ring.tools.tune_model`, among those that Megatron accepts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
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
from cp_ring.plan.sizes.head_split import unsplit
from cp_ring.plan.time import Conditions
from cp_ring.tools import job as jobs
from cp_ring.tools.job import JobConfig
from cp_ring.tools.lengths import packed_rows
from cp_ring.tools.terminal import (
    DEFAULT_DEVICE,
    AsJson,
    Device,
    JobName,
    Overrides,
    choose_for,
    emit,
)
from cp_ring.tools.tune_model import (
    NO_ATTENTION,
    RECOMPUTE,
    AttentionCost,
    ParallelSizes,
    Request,
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
    def bytes(self) -> float:
        """Bytes of a rank."""
        return sum(self.memory.values())


class TuneResult(NamedTuple):
    """The best ways to run a job, the fastest first, each with its job; what to know of them."""

    best: list[tuple[Way, JobConfig]]
    notes: list[str]
    setup: TrainingSetup


def tune_command(
    job: JobName,
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
    if write:  # first, because a reader of what is printed may end early
        way, chosen = result.best[0]
        text = (
            f"# Made by cp-ring tune from {job}. The times that chose it are predicted, not "
            f"measured.\n{yaml.safe_dump(chosen.settings, sort_keys=False)}"
        )
        try:
            Path(write).write_text(text)
        except OSError as error:
            raise ConfigError(f"--write {write}: cannot write: {error.strerror}") from None
    emit(facts(result), as_json, lambda: _print(result, title))
    if write:
        typer.echo(f"wrote {write}: {way.sizes.name}", err=as_json)


def tune(job: JobConfig, request: Request) -> TuneResult:
    """Predict all ways to run the job, and ask Megatron about the fastest until it has accepted
    five.

    Raises `ConfigError` or `PlanError` with one line where there is no way: it names the option or
    the key.
    """
    from cp_ring.megatron.flags.argument_parser import build_parser

    packs = job.cp_ring.document_mask or any(job.megatron.get(key) for key in jobs.PACKED_DATA)
    lengths = request.lengths or (DOCUMENTS if packs else None)
    job = _changed(job, cp_ring={"enabled": True, "document_mask": bool(lengths)})
    parser = build_parser()
    alone = Way(ParallelSizes(1, 1, 1, 1), "none", NO_ATTENTION, {}, {})
    args = _arguments(configured(job, alone), parser)  # with the sizes of the model
    setup = _setup(job, args, replace(request, lengths=lengths))
    accepted, rejected = _accepted(job, setup, search(setup), parser)
    if not accepted:
        name, line = rejected[0]
        raise ConfigError(
            f"Megatron rejects the sizes of all {len(rejected)} fastest jobs; {name}: {line}"
        )
    notes = [f"Megatron rejects {name}, which is faster: {line}" for name, line in rejected[:3]]
    notes += _notes(setup, job, args, [way.step for way, _ in accepted])
    return TuneResult(accepted, notes, setup)


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


def _accepted(
    job: JobConfig, setup: TrainingSetup, ways: Sequence[Way], parser: argparse.ArgumentParser
) -> tuple[list[tuple[Way, JobConfig]], list[tuple[str, str]]]:
    """Return the fastest ways that Megatron accepts, and the reasons why it rejects others."""
    from cp_ring.megatron.validation import rejection

    accepted: list[tuple[Way, JobConfig]] = []
    rejected: list[tuple[str, str]] = []
    for way in ways[:MOST_ASKED]:
        try:
            chosen = configured(job, way)
            problem = rejection(_arguments(chosen, parser), setup.gpus)
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


_NEEDED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "global_batch_size",
    "expert_model_parallel_size",
)


def _setup(job: JobConfig, args: argparse.Namespace, request: Request) -> TrainingSetup:
    """Return the setup that is searched."""
    from cp_ring.megatron.flags.resolve import windows_of

    for name in _NEEDED:
        if (getattr(args, name) or 0) < 1:
            raise ConfigError(f"cp-ring tune needs megatron.{name}: give a number above 0")
    if args.save and not args.save_interval:
        raise ConfigError("give megatron.save_interval, the steps from one checkpoint to the next")
    unit, size = args.make_vocab_size_divisible_by, _vocabulary(job, args) or _DEFAULT_VOCABULARY
    windows = windows_of(args) or ()
    return TrainingSetup(
        **vars(request),
        model=model_sizes(args, windows, -(-(size + 1) // unit) * unit),
        seq_length=args.seq_length,
        global_batch=args.global_batch_size,
        micro_batch=args.micro_batch_size or 1,
        layout=job.cp_ring.layout,
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
    setup: TrainingSetup, job: JobConfig, args: argparse.Namespace, steps: Sequence[float]
) -> Iterator[str]:
    """Return what a person has to know of predicted steps, a line each."""
    rates, experts = setup.rates, setup.model.experts
    if close := sum(step < (1 + SURE) * steps[0] for step in steps[1:]):
        yield (
            f"within {SURE:.0%} of the first: {close} of the others, which the model cannot tell "
            "apart for sure"
        )
    yield (
        f"assumed: a rank computes {rates.forward / 1e12:.3g} TFLOP/s in attention, "
        f"{rates.backward / 1e12:.3g} in backward and {rates.products / 1e12:.3g} in matrix "
        "products, moves "
        f"{rates.memory / 1e9:,.0f} GB/s in memory, {rates.inside / 1e9:.3g} GB/s inside a node of "
        f"{setup.ranks_per_node} and {rates.between / 1e9:.3g} GB/s between nodes"
    )
    if not _vocabulary(job, args):
        yield f"assumed: a vocabulary of {_DEFAULT_VOCABULARY:,}: the configuration names none"
    if setup.lengths:
        yield f"documents: {setup.lengths}, packed into {setup.seq_length:,} tokens"
    if experts.number:
        yield (
            f"experts stay divided among {experts.parallel} ranks, and tokens fall on them evenly"
        )
    if getattr(args, "mtp_num_layers", None):
        yield "layers of multi-token prediction are left out"


def search(setup: TrainingSetup) -> list[Way]:
    """Return the ways to run the job that fit into memory, the fastest first: each of the possible
    sizes with its best attention, and with as little recomputation as memory allows.

    Raises `ConfigError` where nothing fits; it names what needs least memory.
    """
    costs, sizes = attention_costs(setup), possible_sizes(setup)

    def ways(one: ParallelSizes) -> Iterator[Way]:
        for recompute in RECOMPUTE:
            if sum(step_memory(setup, one, recompute).values()) > setup.memory:
                continue  # whatever attention needs, which takes time to plan
            for cost in costs(one.tp, one.cp):
                seconds = step_seconds(setup, one, recompute, cost.seconds)
                yield Way(one, recompute, cost, seconds, step_memory(setup, one, recompute, cost))

    first = (next((way for way in ways(one) if way.bytes <= setup.memory), None) for one in sizes)
    if found := [*filter(None, first)]:
        return sorted(found, key=lambda way: way.step)
    every = [(one, step_memory(setup, one, how)) for one in sizes for how in RECOMPUTE]
    least, items = min(every, key=lambda needed: sum(needed[1].values()))
    parts = sorted(items.items(), key=lambda item: -item[1])[:3]
    shown = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts)
    advice = _undivided(setup) or "take more --gpus or a shorter megatron.seq_length"
    raise ConfigError(
        f"--memory {setup.memory / 1e9:g}: nothing fits; {least.name} needs least, "
        f"{sum(items.values()) / 1e9:.1f} GB without attention's buffers ({shown}): {advice}"
    )


def attention_costs(setup: TrainingSetup) -> Callable[[int, int], list[AttentionCost]]:
    """Return a function of tensor and context parallel size. It returns the costs of attention in
    each way that these sizes allow, the fastest first: the ring, latents, or heads over the ranks
    of a node.
    """
    from cp_ring.memory import memory  # which loads torch

    n, model = setup.seq_length, setup.model
    ends = packed_rows(setup.lengths, n)[0][0] if setup.lengths else [0, n]
    masks = [(Mask.documents(ends, window=w, n=n), count) for w, count in model.windows]

    @cache
    def plans(cp: int, heads: int) -> list[tuple[Plan, int]]:
        spec = PlanSpec(LAYOUTS[setup.layout].of_layers(masks, cp), ulysses=heads)
        made = [(spec.build(mask, cp), count) for mask, count in masks]
        for plan, _ in made:
            plan.verify()
        return made

    @cache
    def costs(tp: int, cp: int) -> list[AttentionCost]:
        near = gcd(cp, max(1, setup.ranks_per_node // tp))
        layer = model.attention(tp, 1)
        ways = [(1, "plain"), *([(1, "latent")] if model.layer.latent and cp > 1 else [])]
        if near > 1 and not unsplit(layer.heads, layer.kv_heads, near):
            ways.append((near, "plain"))
        found = []
        for heads, wire in ways:
            sizes = model.attention(tp, setup.micro_batch, wire)
            total, buffers = np.zeros(4), []
            for plan, count in plans(cp, heads):
                time = plan.time(Conditions(sizes, setup.rates, near))
                total += count * np.array([time.forward, time.both, *time.waits])
                buffers.append(_amounts(memory(plan, sizes)))
            most = map(max, zip(*buffers, strict=True))
            found.append(AttentionCost(heads, wire, tuple(total.tolist()), *most))
        return sorted(found, key=lambda cost: cost.seconds[1])

    return costs


def _amounts(buffers: dict[str, int]) -> tuple[int, int, int]:
    """Return three numbers of bytes: all that is kept, out and lse among it, and the other buffers
    when they are most.
    """
    kept = sum(size for name, size in buffers.items() if name.startswith("kept"))
    results = buffers["gradient of out"] + buffers["kept: lse"]
    return kept, results, sum(buffers.values()) - kept


def possible_sizes(setup: TrainingSetup) -> list[ParallelSizes]:
    """Return the sizes whose product is the number of GPUs, and that divide heads, layers, sequence
    and global batch.

    Tensor-parallel ranks share a node. Raises `PlanError` where there are none.
    """
    given = {"tp": setup.tp, "cp": setup.cp, "pp": setup.pp}
    for name, size in given.items():
        if size is not None and (size < 1 or setup.gpus % size):
            raise PlanError(f"--{name} {size}: it does not divide the {setup.gpus} GPUs of --gpus")
    divisors = [size for size in range(1, setup.gpus + 1) if setup.gpus % size == 0]
    tried = [divisors if size is None else [size] for size in given.values()]
    model, parallel = setup.model, setup.model.experts.parallel
    possible = []
    for tp, cp, pp in product(*tried):
        if setup.gpus % (tp * cp * pp) or tp > setup.ranks_per_node or cp > MAX_RANKS:
            continue
        dp, n, groups = setup.gpus // (tp * cp * pp), setup.seq_length, model.layer.kv_heads
        if (
            model.layer.heads % tp == 0
            and (groups % tp == 0 or tp % groups == 0)
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
            f"--gpus {setup.gpus}: no sizes of tp, cp up to {MAX_RANKS}, pp and dp"
            f"{f' with {kinds}' if kinds else ''} have this product and divide "
            f"{model.layer.heads} heads, {setup.seq_length:,} tokens, {model.layers} layers and a "
            f"global batch of {setup.global_batch} in microbatches of {setup.micro_batch}"
            + (f", with experts over {parallel} ranks" if parallel > 1 else "")
            + hint
        )
    return possible


def facts(result: TuneResult) -> dict[str, Any]:
    """Return the result, ready for JSON. Times are predicted seconds, sizes are bytes."""
    setup = result.setup
    tokens = setup.global_batch * setup.seq_length / setup.gpus
    best = [
        {
            **way.sizes._asdict(),
            "heads": way.attention.heads,
            "wire": way.attention.wire,
            "recompute": way.recompute,
            "tokens_per_s_per_gpu": tokens / way.step,
            "exposed_s": sum(
                way.seconds[name]
                for name in way.seconds
                if "messages" in name or name == "attention waits"
            ),
            "step_s": way.step,
            "seconds": way.seconds,
            "bytes": way.bytes,
            "memory": way.memory,
        }
        for way, _ in result.best
    ]
    return {"best": best, "notes": result.notes}


_SHOWN = {
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "exposed_s": "exposed, s",
    "step_s": "step, s",
    "bytes": "memory, GB",
}


def _print(result: TuneResult, title: str) -> None:
    ways = facts(result)["best"]
    typer.echo(title)

    def line(name: str, values: list[Any], unit: float) -> None:
        cells = (
            f"{x / unit:{',.2f' if x >= unit else '.3g'}}" if isinstance(x, float) else str(x)
            for x in values
        )
        typer.echo(f"{name:<36}" + "".join(f"{cell:>14}" for cell in cells))

    for name, first in ways[0].items():
        values, unit = [way[name] for way in ways], 1e9 if name in ("bytes", "memory") else 1.0
        if not isinstance(first, dict):
            line(_SHOWN.get(name, name), values, unit)
            continue
        for item in dict.fromkeys(item for items in values for item in items):
            line(f"  {item}", [items.get(item, 0.0) for items in values], unit)
    typer.echo("\n".join(f"- {note}" for note in result.notes))
