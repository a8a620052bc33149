"""`cp-ring tune`: the fastest ways to run a job on so many GPUs, by the cost model, of those that
Megatron accepts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cp_ring.errors import ConfigError
from cp_ring.plan.costs.search import Given, Search, Tuned, reasons
from cp_ring.plan.costs.shapes import AUTO
from cp_ring.plan.costs.step_costs import RESERVED_BYTES, TrainingSetup, weight_bytes
from cp_ring.plan.mask import Mask
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.schedule import SLOT_SHARDS, text
from cp_ring.plan.sizes.device_rates import RATES, Rates
from cp_ring.tools import job as jobs
from cp_ring.tools.job import JobConfig, validate

if TYPE_CHECKING:
    from cp_ring.plan.costs.attention_costs import LayerMasks
    from cp_ring.plan.ranges import Ints

BEST = 5
"""Ways that are shown."""

MOST_ASKED = 40
"""Ways of which Megatron is asked at most."""

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
    """What to search for. documents: lengths of the documents of batch rows, () for one causal
    sequence; only the first `planned` of them get plans, all of them show how uneven they are.
    of_documents: where they come from, in words."""

    gpus: int
    ranks_per_node: int = 8
    rates: Rates = RATES
    memory: float = 80e9
    seq_length: int | None = None
    documents: Sequence[Ints] = ()
    of_documents: str = ""
    planned: int = 2
    given: Given = field(default_factory=Given)
    lossy: bool = False


@dataclass(frozen=True)
class TuneResult:
    """The best ways to run a job, the fastest first, each with its job; and what led to them.

    rejected: names of ways that are faster but that Megatron rejects, with its words. by_cp: the
    best way of each
    context-parallel size, or the least memory that any needs where none fits.
    """

    best: list[tuple[Tuned, JobConfig]]
    rejected: list[tuple[str, str]]
    by_cp: dict[int, Tuned | float]
    reasons: list[str]
    assumptions: list[str]
    setup: TrainingSetup


def packs_documents(job: JobConfig) -> bool:
    """Whether the job's batch rows hold several documents that do not see one another."""
    return job.cp_ring.document_mask or any(job.megatron.get(key) for key in jobs.PACKED_DATA)


def tune(job: JobConfig, request: Request) -> TuneResult:
    """Searches, and asks Megatron about the best ways until it has accepted five.

    Raises `ConfigError` or `PlanError` with one line where there is no way: it names the option or
    the key.
    """
    job = _with_length(job, request)
    notes: list[str] = []
    from cp_ring.megatron.flags import acceptance, argument_parser

    parser = argument_parser.build_parser()
    args = _arguments(_alone(job), parser)
    setup, draws, vocabulary = _setup(job, args, request, notes)
    layouts = ("zigzag", "balanced") if request.documents else ("zigzag",)
    search = Search(
        setup,
        draws,
        lambda sizes: (
            weight_bytes(setup, sizes)
            if setup.model.networks is not None
            else acceptance.weight_bytes(args, sizes, vocabulary)
        ),
        request.given,
        layouts,
        request.lossy,
    )
    accepted, rejected = _accepted(job, request, search, parser)
    if not accepted:
        if rejected:
            raise ConfigError(
                f"Megatron rejects all of the {len(rejected)} fastest ways; {rejected[0][0]}: "
                f"{rejected[0][1]}"
            )
        least = min(search.least_bytes.items(), key=lambda entry: entry[1])
        raise ConfigError(
            f"--memory {request.memory / 1e9:g}GB: nothing fits; cp {least[0]} needs least, "
            f"{least[1] / 1e9:.1f} GB without attention's buffers: take more --gpus, or a smaller "
            "--seq-length"
        )
    by_cp = {
        cp: next(search.ranked(cp), None) or search.least_bytes[cp]
        for cp in sorted(search.least_bytes)
    }
    best = [way for way, _ in accepted]
    return TuneResult(
        accepted, rejected, by_cp, reasons(best[0], best[1:], by_cp, request.memory), notes, setup
    )


def _accepted(
    job: JobConfig,
    request: Request,
    search: Search,
    parser: argparse.ArgumentParser,
) -> tuple[list[tuple[Tuned, JobConfig]], list[tuple[str, str]]]:
    """The fastest ways that Megatron accepts, and those that it rejects, with the reasons."""
    from cp_ring.megatron.flags import acceptance

    accepted: list[tuple[Tuned, JobConfig]] = []
    rejected: list[tuple[str, str]] = []
    for way in search.ranked():
        try:
            chosen = configured(job, way, request)
            problem = acceptance.rejection(_arguments(chosen, parser), request.gpus)
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


def _changed(job: JobConfig, **sections: dict[str, Any]) -> JobConfig:
    """The job with other values of some keys; None removes a key of section megatron."""
    settings = job.model_dump(exclude_defaults=True)
    for name, changes in sections.items():
        settings[name] = {**settings.get(name, {}), **changes}
    settings["megatron"] = {
        key: value for key, value in settings["megatron"].items() if value is not None
    }
    return validate(settings, "cp-ring tune")


def _with_length(job: JobConfig, request: Request) -> JobConfig:
    """The job with the sequence length of the request, and a document mask where the request has
    documents.
    """
    changes: dict[str, Any] = {}
    if (n := request.seq_length) is not None:
        most = int(job.megatron.get("max_position_embeddings") or 0)
        changes = {"seq_length": n, "max_position_embeddings": max(most, n)}
    masks = {"document_mask": True} if request.documents and not packs_documents(job) else {}
    return _changed(job, megatron=changes, cp_ring={"enabled": True, **masks})


def _alone(job: JobConfig) -> JobConfig:
    """The job on one rank, whose arguments have the sizes of the model."""
    one = dict.fromkeys(type(job.parallel).model_fields, 1)
    simple = {"heads": 1, "route": "direct", "schedule": "auto", "wire": "auto", "node_size": 0}
    absent = dict.fromkeys((*_SAYS_THE_SAME, "sequence_parallel"))
    return _changed(job, megatron=absent, parallel=one, cp_ring=simple)


def _setup(
    job: JobConfig,
    args: argparse.Namespace,
    request: Request,
    notes: list[str],
) -> tuple[TrainingSetup, list[LayerMasks], int]:
    """What is searched: the setup, the masks of batch rows, and the vocabulary. Adds to `notes`
    what is assumed.
    """
    from cp_ring.megatron.flags import acceptance
    from cp_ring.megatron.flags.validate import windows_of

    windows = windows_of(args) or (((-1, -1), 1),)
    vocabulary = _vocabulary(job, args, notes)
    model = acceptance.model_sizes(args, windows, vocabulary)
    if not args.seq_length or not args.global_batch_size:
        raise ConfigError("cp-ring tune needs megatron.seq_length and megatron.global_batch_size")
    draws = [
        _masks(args.seq_length, windows, lengths)
        for lengths in request.documents[: request.planned]
    ]
    squares = np.array(
        [float((lengths.astype(np.float64) ** 2).sum()) for lengths in request.documents] or [1.0]
    )
    setup = TrainingSetup(
        model=model,
        seq_length=args.seq_length,
        global_batch=args.global_batch_size,
        gpus=request.gpus,
        ranks_per_node=request.ranks_per_node,
        rates=request.rates,
        memory=request.memory,
        spread=float(squares.std() / squares.mean()),
        overlap=bool(args.overlap_grad_reduce),
        distributed=bool(args.use_distributed_optimizer),
        shared_norms=bool(job.megatron.get("sequence_parallel"))
        or args.transformer_impl == "transformer_engine",
    )
    notes += _notes(setup, args, request)
    return setup, draws or [_masks(args.seq_length, windows, None)], vocabulary


def _masks(
    n: int,
    windows: Sequence[tuple[tuple[int, int], int]],
    lengths: Ints | None,
) -> LayerMasks:
    """The masks of a batch row of one sequence, or of documents of these lengths."""
    if lengths is None:
        return [(Mask.causal(n, window), count) for window, count in windows]
    offsets = np.cumsum([0, *lengths])
    return [(Mask.documents(offsets, window=window, n=n), count) for window, count in windows]


def _vocabulary(job: JobConfig, args: argparse.Namespace, notes: list[str]) -> int:
    size = getattr(args, "padded_vocab_size", None) or args.vocab_size
    if jobs.uses_corpus(job):
        size = job.data.vocab_size
    if not size:
        size = _DEFAULT_VOCABULARY
        notes.append(f"a vocabulary of {size:,}: the configuration names none")
    unit = args.make_vocab_size_divisible_by
    return -(-(size + 1) // unit) * unit


def _notes(setup: TrainingSetup, args: argparse.Namespace, request: Request) -> Iterator[str]:
    """What the predictions assume, a line each."""
    rates, experts = setup.rates, setup.model.experts
    yield (
        f"a rank computes {rates.flops / 1e12:.3g} TFLOP/s in attention and "
        f"{rates.flops * rates.products / 1e12:.3g} in matrix products, moves "
        f"{rates.memory / 1e9:,.0f} GB/s in memory, {rates.inside / 1e9:.3g} GB/s inside a node of "
        f"{setup.ranks_per_node} and {setup.link(setup.ranks_per_node + 1) / 1e9:.3g} GB/s between "
        "nodes"
    )
    if request.documents:
        yield f"documents: {request.of_documents}"
    counted = "Megatron's own report"
    if setup.model.networks is not None:
        counted = "their number, as Megatron has no report of hybrid models"
    yield (
        f"weights and optimizer by {counted}, its states shared by data- and context-parallel ranks"
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


def configured(job: JobConfig, way: Tuned, request: Request) -> JobConfig:
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
    parallel = {
        "tensor_model_parallel_size": sizes.tp,
        "context_parallel_size": sizes.cp,
        "pipeline_model_parallel_size": sizes.pp,
        "data_parallel_size": sizes.dp,
    }
    recurrent = [f"{each.layers.kind}={each.way}" for each in way.recurrent]
    cp_ring = {
        "recurrent": ",".join(recurrent) or "heads",
        "route": attention.shape.route,
        "heads": attention.shape.ulysses,
        "schedule": _schedule(way, request),
        "slot_shards": max(SLOT_SHARDS, attention.sources),
        "wire": attention.wire,
        "layout": attention.layout,
        "recompute": way.recompute if again else job.cp_ring.recompute,
        "node_size": 0,
    }
    return _changed(job, megatron=megatron, parallel=parallel, cp_ring=cp_ring)


def _schedule(way: Tuned, request: Request) -> str:
    """The schedule as settings name it: its hops where the ranks, which take the default rates,
    would choose another one.
    """
    shape, hops = way.attention.shape, way.attention.schedule
    route = ROUTES[shape.route]
    fixed = route.own_schedule is not None or route.one_source
    alike = replace(request.rates, products=RATES.products, block=RATES.block) == RATES
    asked = alike or shape.schedule != AUTO or fixed or len(hops) == 1
    return text(shape.schedule if asked else hops)
