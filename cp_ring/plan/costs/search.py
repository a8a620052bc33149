"""The search of `cp-ring tune`: sizes of all parallel dimensions, micro batch, recomputation, and
the shape of attention.

Every combination gets a bound first: its time if attention took no longer than its FLOPs do.
Combinations are looked at in the order of their bounds, until no bound is below the times that are
wanted. So the result is exact in this model, and few plans are made.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from cp_ring.errors import PlanError
from cp_ring.plan.costs.attention_costs import AttentionCosts, KnownPlans, LayerMasks
from cp_ring.plan.costs.recurrent_costs import ChosenWay
from cp_ring.plan.costs.step_costs import (
    EXPOSED,
    RECOMPUTE,
    AttentionCost,
    ParallelSizes,
    TrainingSetup,
    step_memory,
    step_seconds,
)

MAX_RANKS = 256
"""Context-parallel ranks at most: plans of more take seconds to predict."""

LARGE_MICRO_BATCH = 16384
"""With so many tokens a rank, a microbatch of more batch rows is not tried: kernels are busy as it
is.
"""

SURE = 0.05
"""Predicted steps that differ by less may be in another order when they are measured."""


class Tuned(NamedTuple):
    """One way to run the job. seconds, memory: by item, of a step and of a rank. recurrent: as
    `TrainingSetup.recurrent` gives them.
    """

    sizes: ParallelSizes
    micro_batch: int
    recompute: str
    attention: AttentionCost
    seconds: dict[str, float]
    memory: dict[str, float]
    recurrent: Sequence[ChosenWay] = ()

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


class Given(NamedTuple):
    """Sizes that are given; None is searched."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    micro_batch: int | None = None


class Search:
    """The search for one setup.

    draws: masks of batch rows, for each distinct mask of the layers. weights: bytes of a rank's
    weights, gradients and states of
    the optimizer. layouts, lossy: as in `AttentionCosts`.

    Raises `PlanError` where no sizes are possible. The message begins with an option of
    `cp-ring tune`.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        draws: Sequence[LayerMasks],
        weights: Callable[[ParallelSizes], float],
        fixed: Given | None = None,
        layouts: Sequence[str] = ("zigzag",),
        lossy: bool = False,
    ):
        self.setup, self._draws, self._layouts, self._lossy = setup, draws, layouts, lossy
        self._pairs = sum(
            count * int(mask.pieces.area().sum()) for masks in draws for mask, count in masks
        ) / len(draws)
        self._costs: dict[tuple[int, int, int], AttentionCosts] = {}
        self._plans: KnownPlans = {}
        self._weights: dict[ParallelSizes, float] = {}
        self._of_weights = weights
        self._found: dict[tuple[ParallelSizes, int], Tuned | None] = {}
        sizes = possible_sizes(setup, fixed or Given())
        combinations = [
            (one, micro) for one in sizes for micro in self._micro_batches(one, fixed or Given())
        ]
        self._bounds = sorted((self._bound(*one), *one) for one in combinations)
        self.least_bytes = {one.cp: float("inf") for one in sizes}
        """The least memory of any combination, by context-parallel size, whether it fits or not."""

    def _micro_batches(self, sizes: ParallelSizes, fixed: Given) -> list[int]:
        share = self.setup.global_batch // sizes.dp
        if fixed.micro_batch is not None:
            return [fixed.micro_batch] if share % fixed.micro_batch == 0 else []
        tried = (1, 2, 4, 8)
        return [
            m
            for m in tried
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

    def ranked(self, cp: int | None = None) -> Iterator[Tuned]:
        """The combinations that fit into memory, the fastest first, each with its best shape; with
        `cp`, those of this size.
        """
        done: list[tuple[float, int, Tuned]] = []
        for number, (bound, sizes, micro_batch) in enumerate(self._bounds):
            if cp not in (None, sizes.cp):
                continue
            while done and done[0][0] <= bound:
                yield heapq.heappop(done)[2]
            if best := self._best(sizes, micro_batch):
                heapq.heappush(done, (best.step, number, best))
        while done:
            yield heapq.heappop(done)[2]

    def _best(self, sizes: ParallelSizes, micro_batch: int) -> Tuned | None:
        key = sizes, micro_batch
        if key not in self._found:
            self._found[key] = self._search_shapes(sizes, micro_batch)
        return self._found[key]

    def _search_shapes(self, sizes: ParallelSizes, micro_batch: int) -> Tuned | None:
        """The fastest shape that fits, with as little recomputation as memory allows."""
        setup, limit = self.setup, self.setup.memory
        if sizes not in self._weights:
            self._weights[sizes] = self._of_weights(sizes)
        weights = self._weights[sizes]
        fitting: list[Tuned] = []
        for recompute in RECOMPUTE:
            least = sum(step_memory(setup, sizes, micro_batch, recompute, None, weights).values())
            self.least_bytes[sizes.cp] = min(self.least_bytes[sizes.cp], least)
            if least > limit or fitting:
                continue
            for cost in self._attention(sizes, micro_batch):
                memory = step_memory(setup, sizes, micro_batch, recompute, cost, weights)
                if sum(memory.values()) <= limit:
                    seconds = step_seconds(setup, sizes, micro_batch, recompute, cost[5:9])
                    linear = setup.recurrent(sizes, micro_batch)
                    fitting.append(
                        Tuned(sizes, micro_batch, recompute, cost, seconds, memory, linear)
                    )
                    break
        return min(fitting, key=lambda one: one.step, default=None)

    def _attention(self, sizes: ParallelSizes, micro_batch: int) -> AttentionCosts:
        key = sizes.tp, sizes.cp, micro_batch
        if key not in self._costs:
            setup = self.setup
            self._costs[key] = AttentionCosts(
                setup.model,
                self._draws,
                *key,
                setup.ranks_per_node,
                setup.rates,
                self._layouts,
                self._lossy,
                self._plans,
            )
        return self._costs[key]


def possible_sizes(setup: TrainingSetup, fixed: Given) -> list[ParallelSizes]:
    """The sizes whose product is the number of GPUs, and that divide heads, layers, sequence and
    global batch.

    Tensor-parallel ranks share a node. Raises `PlanError` where there are none.
    """
    for option, size in (("--tp", fixed.tp), ("--cp", fixed.cp), ("--pp", fixed.pp)):
        if size is not None and (size < 1 or setup.gpus % size):
            raise PlanError(f"{option} {size}: it does not divide the {setup.gpus} GPUs of --gpus")
    divisors = [size for size in range(1, setup.gpus + 1) if setup.gpus % size == 0]
    tried = [divisors if size is None else [size] for size in fixed[:3]]
    model, parallel = setup.model, setup.model.experts.parallel if setup.model.experts else 1
    possible = []
    for tp, cp, pp in product(*tried):
        if setup.gpus % (tp * cp * pp) or tp > setup.ranks_per_node or cp > MAX_RANKS:
            continue
        dp = setup.gpus // (tp * cp * pp)
        heads = model.heads % tp == 0 and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)
        sequence = (
            cp == 1 or setup.seq_length % (2 * cp) == 0
        ) and setup.seq_length // cp % tp == 0
        experts = (setup.gpus // pp) % parallel == 0
        if (
            heads
            and sequence
            and experts
            and model.layers % pp == 0
            and setup.global_batch % dp == 0
        ):
            possible.append(ParallelSizes(tp, cp, pp, dp))
    if not possible:
        kinds = ", ".join(
            f"{name} {size}" for name, size in fixed._asdict().items() if size is not None
        )
        raise PlanError(
            f"--gpus {setup.gpus}: no sizes of tp, cp, pp and "
            f"dp{f' with {kinds}' if kinds else ''} have this product and divide {model.heads} "
            f"heads, {setup.seq_length:,} tokens, {model.layers} layers and a global batch of "
            f"{setup.global_batch}"
            + (f", with experts over {parallel} ranks" if parallel > 1 else "")
        )
    return possible


def reasons(
    best: Tuned, others: Sequence[Tuned], by_cp: dict[int, Tuned | float], limit: float
) -> list[str]:
    """Why the best one won, a line each: against the next one, and against half and twice its
    context-parallel size.

    by_cp: the best one of each context-parallel size, or the least memory that it needs where none
    fits.
    """
    lines = []
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
    without = best.recompute != "none"
    lines += ["without recomputation it does not fit"] if without else []
    close = sum(other.step < (1 + SURE) * best.step for other in others)
    lines += (
        [
            f"within {SURE:.0%} of it: {close} of the others, which the model cannot tell apart "
            "for sure"
        ]
        if close
        else []
    )
    return lines


def _difference(best: Tuned, other: Tuned) -> str:
    """By how much the other is slower, and the items that it loses most on, of those the best one
    is slower at.
    """
    slower = other.step / best.step - 1
    names = dict.fromkeys([*other.seconds, *best.seconds])
    changes = {name: other.seconds.get(name, 0.0) - best.seconds.get(name, 0.0) for name in names}
    largest = sorted(changes, key=lambda name: -abs(changes[name]))[:3]
    shown = [
        f"{name} {changes[name]:+.3g} s"
        for name in largest
        if abs(changes[name]) > 1e-3 * best.step
    ]
    return f"{slower:.1%} slower" + (f" ({', '.join(shown)})" if shown else "")
