"""`cp-ring tune`: the fastest sizes of all parallel dimensions for a job on so many GPUs, by the
model in `cp_ring.tools.tune_model`, of those that Megatron accepts.

Every combination gets a bound first: its time if attention took no longer than its FLOPs do.
Combinations are looked at in the order of their bounds, until no bound is below the times that are
wanted. So the result is exact in this model, and few plans are made.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
import yaml

from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.cost import attention_time, memory
from cp_ring.plan.layout import NamedLayout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.proof.verify import Report
from cp_ring.plan.ranges import Ints
from cp_ring.plan.sizes.device_rates import RATES, Rates
from cp_ring.plan.sizes.head_split import unsplit
from cp_ring.tools import job as jobs
from cp_ring.tools import lengths as documents
from cp_ring.tools.job import JobConfig
from cp_ring.tools.terminal import (
    DEFAULT_RATES,
    JOB,
    WRITTEN,
    AsJson,
    Overrides,
    emit,
    named_rates,
)
from cp_ring.tools.terminal import Rates as NamedRates
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

LARGE_MICRO_BATCH = 16384
"""With so many tokens a rank, a microbatch of more batch rows is not tried: kernels are busy as it
is.
"""

SURE, ALIKE, ROOM = 0.05, 0.02, 0.1
"""Predicted steps that differ by less than SURE may be in another order when they are measured. A
way that is slower by at most ALIKE, but leaves so much more of a GPU's memory free, is written.
"""

DOCUMENT = 4000
"""Tokens of a document on average, where a job packs documents and nothing says how long."""

DRAWN, PLANNED = 32, 2
"""Batch rows of documents that are drawn to see how uneven they are, and of these planned."""

_DEFAULT_VOCABULARY = 128_256
# as the number of ranks that exchange heads
_SAYS_THE_SAME = ("cp_comm_type", "hierarchical_context_parallel_sizes")
_RECOMPUTE = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)

LayerMasks = Sequence[tuple[Mask, int]]
"""The masks of a batch row, and the number of layers that have each."""


class Given(NamedTuple):
    """Sizes that are given; None is searched."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None


ANY = Given()


@dataclass(frozen=True)
class Request:
    """What to search for. documents: lengths of the documents of batch rows, () for one causal
    sequence. of_documents: where they come from, in words.
    """

    gpus: int
    ranks_per_node: int = 8
    rates: Rates = RATES
    memory: float = 80e9
    documents: Sequence[Ints] = ()
    of_documents: str = ""
    given: Given = ANY


class Way(NamedTuple):
    """One way to run the job. seconds, memory: by item, of a step and of a rank."""

    sizes: ParallelSizes
    micro_batch: int
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
    best way of each context-parallel size, or the least memory that any needs where none fits.
    """

    best: list[tuple[Way, JobConfig]]
    rejected: list[tuple[str, str]]
    by_cp: dict[int, Way | float]
    assumptions: list[str]
    setup: TrainingSetup

    @property
    def written(self) -> tuple[Way, JobConfig]:
        """The way that --write takes: the fastest, or one that is hardly slower and leaves much
        more memory free.
        """
        first = self.best[0][0]
        alike = [one for one in self.best if one[0].step <= (1 + ALIKE) * first.step]
        least = min(alike, key=lambda one: one[0].bytes)
        spared = first.bytes - least[0].bytes
        return least if spared >= ROOM * self.setup.memory else self.best[0]


def tune_command(
    job: Annotated[str, typer.Argument(help=JOB, metavar="JOB")],
    gpus: Annotated[int, typer.Option(help="GPUs of the job.", min=1)],
    overrides: Overrides = None,
    ranks_per_node: Annotated[int, typer.Option(help="GPUs of a node.", min=1)] = 8,
    rates: NamedRates = DEFAULT_RATES,
    memory: Annotated[float, typer.Option(help="GB of a GPU.", min=1, metavar="GB")] = 80,
    lengths: Annotated[
        str | None,
        typer.Option(help="Documents: a file of lengths, or lognormal:MEAN."),
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel size; searched.")] = None,
    cp: Annotated[int | None, typer.Option(help="Context parallel size; searched.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline parallel size; searched.")] = None,
    write: Annotated[
        str | None, typer.Option(help="Write the best configuration.", **WRITTEN)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest ways to run a job on so many GPUs. All times are predicted. Needs no GPU."""
    if gpus > ranks_per_node and gpus % ranks_per_node:
        raise PlanError(f"--gpus {gpus} is not a multiple of --ranks-per-node {ranks_per_node}")
    loaded = jobs.load(job, overrides or [])
    drawn, origin = draw_documents(loaded, lengths)
    request = Request(
        gpus=gpus,
        ranks_per_node=min(ranks_per_node, gpus),
        rates=named_rates(rates),
        memory=memory * 1e9,
        documents=drawn,
        of_documents=origin,
        given=Given(tp, cp, pp),
    )
    result = tune(loaded, request)
    title = f"{job} on {gpus} GPUs, rates {rates}: predicted, not measured"
    emit(facts(result), as_json, lambda: _print(result, title))
    if write:
        way, chosen = result.written
        settings = chosen.model_dump(mode="json", exclude_defaults=True)
        Path(write).write_text(
            f"# Made by cp-ring tune from {job}. The times that chose it are predicted, not "
            f"measured.\n{yaml.safe_dump(settings, sort_keys=False)}"
        )
        typer.echo(f"wrote {write}: {way.sizes.name}, {way.bytes / 1e9:.0f} GB", err=as_json)


def packs_documents(job: JobConfig) -> bool:
    """Whether the job's batch rows hold several documents that do not see one another."""
    return job.cp_ring.document_mask or any(job.megatron.get(key) for key in jobs.PACKED_DATA)


def draw_documents(job: JobConfig, spec: str | None) -> tuple[list[Ints], str]:
    """Lengths of the documents of some batch rows, and where they come from; none for a job without
    documents.
    """
    if spec is None and not packs_documents(job):
        return [], ""
    chosen = spec or f"lognormal:{DOCUMENT}"
    n = job.megatron.get("seq_length")
    if not isinstance(n, int) or n < 1:
        raise ConfigError(
            f"megatron.seq_length {n!r}: it must be the number of tokens of a batch row"
        )
    packed = f"{chosen}, packed into {n:,} tokens"
    if not spec:
        packed += " (the configuration packs documents, and --lengths is not given)"
    if chosen.startswith("lognormal:"):
        return [documents.lengths(chosen, n, draw) for draw in range(DRAWN)], packed
    known = documents.lengths(chosen, None)
    rng = np.random.default_rng(0)
    count = math.ceil(4 * n / known.mean()) + 64
    drawn = [np.cumsum(rng.choice(known, count)) for _ in range(DRAWN)]
    return [np.diff([0, *ends[ends < n], n]) for ends in drawn], f"drawn from {packed}"


def tune(job: JobConfig, request: Request, advise: bool = True) -> TuneResult:
    """Searches, and asks Megatron about the best ways until it has accepted five.

    Raises `ConfigError` or `PlanError` with one line where there is no way: it names the option or
    the key; with `advise` also what fits.
    """
    from cp_ring.tools import megatron_flags

    masks = {"document_mask": True} if request.documents and not packs_documents(job) else {}
    job = _changed(job, cp_ring={"enabled": True, **masks})
    parser = megatron_flags.build_parser()
    args = _arguments(_alone(job), parser)
    notes: list[str] = []
    setup, draws = _setup(job, args, request, notes)
    search = Search(setup, draws, request.given)
    accepted, rejected = _accepted(job, request, search, parser)
    if not accepted and rejected:
        name, line = rejected[0]
        raise ConfigError(
            f"Megatron rejects all of the {len(rejected)} fastest ways; {name}: {line}"
        )
    if not accepted:
        raise ConfigError(_nothing_fits(search, job, request, advise))
    by_cp: dict[int, Way | float] = {
        cp: next(search.ranked(cp), None) or least for cp, least in sorted(search.least.items())
    }
    return TuneResult(accepted, rejected, by_cp, notes, setup)


def _nothing_fits(search: Search, job: JobConfig, request: Request, advise: bool) -> str:
    """Why nothing fits, and what would."""
    limit, (sizes, items) = request.memory / 1e9, search.smallest
    parts = sorted(items.items(), key=lambda item: -item[1])[:3]
    shown = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts)
    line = (
        f"--memory {limit:g}: nothing fits; {sizes.name} needs least, "
        f"{sum(items.values()) / 1e9:.1f} GB without attention's buffers ({shown})"
    )
    for gpus in (2, 4, 8) if advise else ():
        with contextlib.suppress(ConfigError, PlanError):
            way, _ = tune(job, replace(request, gpus=gpus * request.gpus), advise=False).best[0]
            needed = f"--gpus {gpus * request.gpus} fits"
            return f"{line}; {needed} ({way.sizes.name}, {way.bytes / 1e9:.0f} GB)"
    return f"{line}; GPUs with more memory, a smaller model or a shorter megatron.seq_length would"


def _accepted(
    job: JobConfig, request: Request, search: Search, parser: argparse.ArgumentParser
) -> tuple[list[tuple[Way, JobConfig]], list[tuple[str, str]]]:
    """The fastest ways that Megatron accepts, and those that it rejects, with the reasons."""
    from cp_ring.tools import megatron_flags

    accepted: list[tuple[Way, JobConfig]] = []
    rejected: list[tuple[str, str]] = []
    for way in search.ranked():
        try:
            chosen = configured(job, way)
            problem = megatron_flags.rejection(_arguments(chosen, parser), request.gpus)
        except ConfigError as error:
            problem = "; ".join(error.args)
        if problem:
            rejected.append((way.sizes.name, problem))
        else:
            accepted.append((way, chosen))
        if len(accepted) == BEST or len(accepted) + len(rejected) == MOST_ASKED:
            break
    return accepted, rejected


def _arguments(job: JobConfig, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What Megatron's parser reads from the flags of a job, checked by cp_ring."""
    device = "cpu" if job.launch.device == "cpu" else "cuda"
    with contextlib.redirect_stdout(io.StringIO()):
        return jobs.megatron_flags(job, jobs.find_corpus(job), device, parser)[1]


def _changed(job: JobConfig, **sections: Any) -> JobConfig:
    """The job with other values of some keys; None removes a key of section megatron."""
    settings = job.model_dump(exclude_defaults=True)
    for name, changes in sections.items():
        settings[name] = {**settings.get(name, {}), **changes}
    settings["megatron"] = {
        key: value for key, value in settings["megatron"].items() if value is not None
    }
    return jobs.validate(settings, "cp-ring tune")


def _alone(job: JobConfig) -> JobConfig:
    """The job on one rank, whose arguments have the sizes of the model."""
    one = dict.fromkeys(jobs.SPLITS, 1)
    simple = {"heads": 1, "route": "direct", "schedule": "auto", "wire": "auto"}
    absent = dict.fromkeys((*_SAYS_THE_SAME, "sequence_parallel"))
    return _changed(job, megatron=absent | one, launch={"ranks": 1}, cp_ring=simple)


def configured(job: JobConfig, way: Way) -> JobConfig:
    """The job that runs this way."""
    sizes, attention = way.sizes, way.attention
    again = way.recompute != "none"
    megatron: dict[str, Any] = dict.fromkeys((*_SAYS_THE_SAME, *_RECOMPUTE))
    megatron["micro_batch_size"] = way.micro_batch
    if again:
        megatron |= zip(_RECOMPUTE, ("full", "uniform", 1), strict=False)
    local = job.megatron.get("transformer_impl") == "local"
    shared = bool(job.megatron.get("sequence_parallel")) or not local
    megatron["sequence_parallel"] = sizes.tp > 1 and shared
    if job.megatron.get("num_experts") and sizes.tp > 1:
        experts = job.megatron.get("expert_tensor_parallel_size") or 1
        megatron["expert_tensor_parallel_size"] = experts
    megatron |= zip(jobs.SPLITS, (sizes.tp, sizes.pp, sizes.cp), strict=True)
    ranks = {"ranks": math.prod(sizes)}
    cp_ring = {
        "heads": attention.heads,
        "route": "direct",
        "schedule": "auto",
        "wire": attention.wire,
        "layout": attention.layout,
        "recompute": way.recompute if again else job.cp_ring.recompute,
    }
    return _changed(job, megatron=megatron, launch=ranks, cp_ring=cp_ring)


def _setup(
    job: JobConfig, args: argparse.Namespace, request: Request, notes: list[str]
) -> tuple[TrainingSetup, list[LayerMasks]]:
    """What is searched, and the masks of batch rows. Adds to `notes` what is assumed."""
    from cp_ring.megatron.flags.resolve import windows_of

    if not args.seq_length or not args.global_batch_size:
        raise ConfigError("cp-ring tune needs megatron.seq_length and megatron.global_batch_size")
    windows = windows_of(args) or (((-1, -1), 1),)
    size = getattr(args, "padded_vocab_size", None) or args.vocab_size
    size = job.data.vocab_size if jobs.uses_corpus(job) else size
    if not size:
        size = _DEFAULT_VOCABULARY
        notes.append(f"a vocabulary of {size:,}: the configuration names none")
    unit = args.make_vocab_size_divisible_by
    model = model_sizes(args, windows, -(-(size + 1) // unit) * unit)
    edges = [np.cumsum([0, *lengths]) for lengths in request.documents[:PLANNED]]
    n = args.seq_length
    draws: list[LayerMasks] = [
        [(Mask.documents(ends, window=window, n=n), count) for window, count in windows]
        for ends in edges or [np.array([0, n])]
    ]
    squares = [float((np.asarray(x, float) ** 2).sum()) for x in request.documents] or [1.0]
    setup = TrainingSetup(
        model=model,
        seq_length=n,
        global_batch=args.global_batch_size,
        gpus=request.gpus,
        ranks_per_node=request.ranks_per_node,
        rates=request.rates,
        memory=request.memory,
        spread=float(np.std(squares) / np.mean(squares)),
        overlap=bool(args.overlap_grad_reduce),
        distributed=bool(args.use_distributed_optimizer),
        shared_norms=bool(job.megatron.get("sequence_parallel"))
        or args.transformer_impl == "transformer_engine",
    )
    notes += _notes(setup, args, request)
    return setup, draws


def _notes(setup: TrainingSetup, args: argparse.Namespace, request: Request) -> Iterator[str]:
    """What the predictions assume, a line each."""
    rates, experts = setup.rates, setup.model.experts
    yield (
        f"a rank computes {rates.flops / 1e12:.3g} TFLOP/s in attention and "
        f"{rates.flops * rates.products / 1e12:.3g} in matrix products, moves "
        f"{rates.memory / 1e9:,.0f} GB/s in memory, {rates.inside / 1e9:.3g} GB/s inside a node of "
        f"{setup.ranks_per_node} and {rates.between / 1e9:.3g} GB/s between nodes"
    )
    if request.documents:
        yield f"documents: {request.of_documents}"
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


class Search:
    """The search for one setup. draws: masks of batch rows, for each distinct mask of the layers.

    Raises `PlanError` where no sizes are possible, with a line that begins with an option.
    """

    def __init__(self, setup: TrainingSetup, draws: Sequence[LayerMasks], given: Given = ANY):
        self.setup, self._draws = setup, draws
        several = any(len(mask.pieces) > 1 for masks in draws for mask, _ in masks)
        self._layouts = ("zigzag", "balanced") if several else ("zigzag",)
        self._pairs = sum(
            count * int(mask.pieces.area().sum()) for masks in draws for mask, count in masks
        ) / len(draws)
        self._plans: dict[tuple[int, int, str], list[tuple[Plan, Report, float]]] = {}
        self._costs: dict[tuple[int, int, int], list[AttentionCost]] = {}
        self._found: dict[tuple[ParallelSizes, int], Way | None] = {}
        sizes = possible_sizes(setup, given)
        self._bounds = sorted(
            (self._bound(one, micro), one, micro)
            for one in sizes
            for micro in self._micro_batches(one)
        )
        self.least = {one.cp: math.inf for one in sizes}
        """The least memory of any combination, by context-parallel size, whether it fits or not."""
        self.smallest: tuple[ParallelSizes, dict[str, float]] = (sizes[0], {"": math.inf})
        """The sizes that need least memory, and what for."""

    def _micro_batches(self, sizes: ParallelSizes) -> list[int]:
        share = self.setup.global_batch // sizes.dp
        return [
            m
            for m in (1, 2, 4, 8)
            if share % m == 0 and (m == 1 or self.setup.tokens(sizes, m) <= LARGE_MICRO_BATCH)
        ]

    def _bound(self, sizes: ParallelSizes, micro_batch: int) -> float:
        """Seconds that a step takes at least."""
        of_rank = self.setup.model.attention(sizes.tp, micro_batch)
        rate = self.setup.rates.flops * sizes.cp / self._pairs
        forward, backward = (flops / rate for flops in of_rank.pair_flops)
        both = forward + backward
        return sum(
            step_seconds(self.setup, sizes, micro_batch, "none", (forward, both, 0.0, 0.0)).values()
        )

    def ranked(self, cp: int | None = None) -> Iterator[Way]:
        """The combinations that fit into memory, the fastest first, each with its best attention;
        with `cp`, those of this size.
        """
        done: list[tuple[float, int, Way]] = []
        for number, (bound, sizes, micro_batch) in enumerate(self._bounds):
            if cp not in (None, sizes.cp):
                continue
            while done and done[0][0] <= bound:
                yield heapq.heappop(done)[2]
            key = sizes, micro_batch
            if key not in self._found:
                self._found[key] = self._best(sizes, micro_batch)
            if best := self._found[key]:
                heapq.heappush(done, (best.step, number, best))
        while done:
            yield heapq.heappop(done)[2]

    def _best(self, sizes: ParallelSizes, micro_batch: int) -> Way | None:
        """The fastest way that fits, with as little recomputation as memory allows."""
        for recompute in RECOMPUTE:
            items = step_memory(self.setup, sizes, micro_batch, recompute, None)
            least = sum(items.values())
            self.least[sizes.cp] = min(self.least[sizes.cp], least)
            if least < sum(self.smallest[1].values()):
                self.smallest = sizes, items
            if least > self.setup.memory:
                continue
            for cost in self._attention(sizes, micro_batch):
                items = step_memory(self.setup, sizes, micro_batch, recompute, cost)
                if sum(items.values()) <= self.setup.memory:
                    seconds = step_seconds(self.setup, sizes, micro_batch, recompute, cost.seconds)
                    return Way(sizes, micro_batch, recompute, cost, seconds, items)
        return None

    def _attention(self, sizes: ParallelSizes, micro_batch: int) -> list[AttentionCost]:
        """What attention costs in each way that these sizes allow, the fastest first: the ring, or
        heads over the ranks of a node.
        """
        key = sizes.tp, sizes.cp, micro_batch
        if key not in self._costs:
            model = self.setup.model
            near = gcd(sizes.cp, max(1, self.setup.ranks_per_node // sizes.tp))
            layer = model.attention(sizes.tp, 1)
            apart = unsplit(layer.heads, layer.kv_heads, near)
            ways = [(1, "plain"), *([(1, "latent")] if model.latent and sizes.cp > 1 else [])]
            ways += [(near, "plain")] if near > 1 and not apart else []
            costs = [
                self._cost(*key, near, count, wire, layout)
                for layout in self._layouts
                for count, wire in ways
            ]
            self._costs[key] = sorted(costs, key=lambda cost: cost.seconds[1])
        return self._costs[key]

    def _cost(
        self, tp: int, cp: int, batch: int, near: int, heads: int, wire: str, layout: str
    ) -> AttentionCost:
        sizes = self.setup.model.attention(tp, batch, wire)
        total, buffers = np.zeros(4), []
        for plan, report, count in self._plans_of(cp, near, heads, layout):
            time = attention_time(plan, report, sizes, self.setup.rates, near)
            total += count * np.array([time.forward, time.both, *time.waits])
            buffers.append(_amounts(report, memory(report, sizes.of_rank(heads))))
        kept, results, slots, sums = (max(each) for each in zip(*buffers, strict=True))
        forward, both, waits, waits_both = total.tolist()
        seconds = (forward, both, waits, waits_both)
        return AttentionCost(heads, wire, layout, seconds, kept, results, slots, sums)

    def _plans_of(
        self, cp: int, near: int, heads: int, name: str
    ) -> list[tuple[Plan, Report, float]]:
        """The proven plans of all layers and draws, and the layers that have each."""
        key = cp, heads, name
        if key not in self._plans:
            made = self._plans[key] = []
            for masks in self._draws:
                spec = PlanSpec(NamedLayout.named(name).of_layers(masks, cp), ulysses=heads)
                for mask, count in masks:
                    plan = spec.build(mask, cp)
                    made.append((plan, plan.verify(), count / len(self._draws)))
        return self._plans[key]


def _amounts(report: Report, buffers: dict[str, int]) -> tuple[int, int, int, int]:
    """Bytes that are kept, of these out and lse, of receive buffers, and of the other buffers at
    the time they are most.
    """

    def together(begin: str) -> int:
        return sum(size for name, size in buffers.items() if name.startswith(begin))

    slots = buffers["both: key and value slots"]
    results = buffers["forward: out in float32"] // 2 + buffers["kept: lse"]
    working = max(together("forward"), together("backward"))
    return together("kept"), results, slots, together("both") - slots + working


def possible_sizes(setup: TrainingSetup, given: Given) -> list[ParallelSizes]:
    """The sizes whose product is the number of GPUs, and that divide heads, layers, sequence and
    global batch.

    Tensor-parallel ranks share a node. Raises `PlanError` where there are none.
    """
    for option, size in (("--tp", given.tp), ("--cp", given.cp), ("--pp", given.pp)):
        if size is not None and (size < 1 or setup.gpus % size):
            raise PlanError(f"{option} {size}: it does not divide the {setup.gpus} GPUs of --gpus")
    divisors = [size for size in range(1, setup.gpus + 1) if setup.gpus % size == 0]
    tried = [divisors if size is None else [size] for size in given]
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
            and (setup.gpus // pp) % parallel == 0
            and model.layers % pp == 0
            and setup.global_batch % dp == 0
        ):
            possible.append(ParallelSizes(tp, cp, pp, dp))
    if not possible:
        kinds = ", ".join(f"{name} {size}" for name, size in given._asdict().items() if size)
        raise PlanError(
            f"--gpus {setup.gpus}: no sizes of tp, cp, pp and dp{f' with {kinds}' if kinds else ''}"
            f" have this product and divide {model.heads} heads, {setup.seq_length:,} tokens, "
            f"{model.layers} layers and a global batch of {setup.global_batch}"
            + (f", with experts over {parallel} ranks" if parallel > 1 else "")
        )
    return possible


def reasons(result: TuneResult) -> list[str]:
    """Why the best one won, a line each: against the next one, and against half and twice its
    context-parallel size.
    """
    best, *others = [way for way, _ in result.best]
    limit, by_cp, lines = result.setup.memory, result.by_cp, []
    for name, reason in result.rejected[:3]:
        lines.append(f"Megatron rejects {name}, which is faster: {reason}")
    for other in others[:1]:
        batch = f", micro batch {other.micro_batch}" if other.sizes == best.sizes else ""
        lines.append(f"the next, {other.sizes.name}{batch}: {_difference(best, other)}")
    cps = sorted(by_cp)
    place = cps.index(best.sizes.cp)
    for cp in [*cps[max(place - 1, 0) : place], *cps[place + 1 : place + 2]]:
        at_best = by_cp[cp]
        if isinstance(at_best, float):
            lines.append(
                f"cp {cp} does not fit: at least {at_best / 1e9:.0f} of {limit / 1e9:.0f} GB"
            )
        elif not others or at_best is not others[0]:
            lines.append(f"cp {cp} at best, {at_best.sizes.name}: {_difference(best, at_best)}")
    if best.recompute != "none":
        lines.append("without recomputation it does not fit")
    if close := sum(other.step < (1 + SURE) * best.step for other in others):
        lines.append(
            f"within {SURE:.0%} of it: {close} of the others, which the model cannot tell apart "
            "for sure"
        )
    if (way := result.written[0]) is not best:
        spared = (best.bytes - way.bytes) / 1e9
        lines.append(
            f"--write takes {way.sizes.name}: {way.step / best.step - 1:.1%} slower, with "
            f"{spared:.0f} GB more to spare"
        )
    return lines


def _difference(best: Way, other: Way) -> str:
    """By how much the other is slower, and the items in which they differ most."""
    names = dict.fromkeys([*other.seconds, *best.seconds])
    changes = {name: other.seconds.get(name, 0.0) - best.seconds.get(name, 0.0) for name in names}
    shown = [
        f"{name} {changes[name]:+.3g} s"
        for name in sorted(changes, key=lambda name: -abs(changes[name]))[:3]
        if abs(changes[name]) > 1e-3 * best.step
    ]
    return f"{other.step / best.step - 1:.1%} slower" + (f" ({', '.join(shown)})" if shown else "")


def facts(result: TuneResult) -> dict[str, Any]:
    """The result, ready for JSON. Times are predicted seconds, sizes are bytes."""
    return {
        "best": [_way(result, way) for way, _ in result.best],
        "written": _way(result, result.written[0]),
        "by_cp": {
            cp: {"least_bytes": way} if isinstance(way, float) else _way(result, way)
            for cp, way in result.by_cp.items()
        },
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
        "layout": way.attention.layout,
        "micro_batch": way.micro_batch,
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
