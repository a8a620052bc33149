"""`cp-ring tune --check`: predicted beside measured times of a small model on 4 CPU ranks, for all
shapes that they can have.

Every shape works on the same batch: with context parallel size 1 each rank takes one sequence of
it, with 4 all ranks share each. The rates are measured on the same ranks, while all of them work,
in the same rounds. So a slow minute of the machine slows rates and shapes alike. The times are
medians over the rounds.

Where there are fewer cores than ranks, the ranks take turns. A message is then work of a core like
any other: it hides behind nothing, and the prediction adds the two up. With `cpu` the same is
compared in CPU time of the ranks, which other work on the machine hardly changes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import linear

from cp_ring import Layout, Mask, ring_attention
from cp_ring.plan.costs.rank_updates import kernel_calls
from cp_ring.plan.costs.shapes import AUTO, planned, shapes_of
from cp_ring.plan.costs.simulate import simulate
from cp_ring.plan.lower import KERNELS
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import RATES, Rates
from cp_ring.runtime import RUNTIME
from cp_ring.testing.rank_pool import Ranks
from cp_ring.tools.job.speeds import exchange, memory_rate, timed

RANKS = 4

_BLOCK = 512  # keys that PyTorch's kernel for the CPU computes at a time
_TINY = 64  # tokens of a call whose time is what every call loses
_MESSAGE_BYTES = 1 << 21


@dataclass(frozen=True)
class SmallModel:
    """A decoder of `layers` layers with random weights in float32, and the tokens of a sequence."""

    tokens: int = 2048
    layers: int = 2
    heads: int = 4
    head_dim: int = 64
    ffn: int = 512

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def sizes(self) -> AttentionSizes:
        """The attention of a layer; as many heads for keys and values, so that much travels."""
        return AttentionSizes(self.heads, self.heads, self.head_dim, dtype="fp32")

    @property
    def parameters(self) -> int:
        """Parameters of a layer."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.ffn


class CheckedShape(NamedTuple):
    """A context parallel size and the shape of its attention."""

    cp: int
    shape: PlanSpec

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"cp {self.cp} {self.shape.name}"


@dataclass
class CheckResult:
    """What was predicted and measured. times: a line for each shape, of a step and of attention in
    it, in seconds.

    spearman: the rank correlation of steps. error: the median of |predicted / measured - 1| of
    attention.
    """

    cores: int
    cpu: bool
    rates: Rates
    times: list[dict[str, Any]] = field(default_factory=list)
    spearman: float = 0.0
    error: float = 0.0


def checked_shapes(model: SmallModel) -> list[CheckedShape]:
    """All that differ: context parallel sizes 1, 2 and 4, heads, the routes and the schedules."""
    shapes: dict[Any, CheckedShape] = {}
    for cp in (1, 2, 4):
        names = ("ring", "gather") if cp > 2 else ()
        several = [PlanSpec(schedule=name, node_size=cp) for name in names]
        every = PlanSpec(route=AUTO, node_size=cp)
        for shape in [*shapes_of(cp, model.sizes, every), *several]:
            checked = CheckedShape(cp, shape)
            schedule = _plan(model, checked, RATES).schedule
            shapes.setdefault((cp, shape.route * (cp > 2), shape.ulysses, schedule), checked)
    return [*shapes.values()]


def _plan(model: SmallModel, checked: CheckedShape, rates: Rates) -> Plan:
    return planned(Mask.causal(model.tokens), checked.cp, checked.shape, rates)


def run(repeats: int, model: SmallModel | None = None, cpu: bool = False) -> CheckResult:
    """Measures `repeats` rounds on 4 processes of one thread each, and predicts from the rates of
    the same rounds.

    cpu: measure CPU time instead of wall time.
    """
    model = model or SmallModel()
    shapes = checked_shapes(model)
    ranks = Ranks(RANKS)
    speeds: list[dict[str, float]] = []
    steps: dict[CheckedShape, list[tuple[float, float]]] = {shape: [] for shape in shapes}
    try:
        for shape in shapes:
            ranks.run(one_step, RANKS, model, shape, cpu)
        for number in range(repeats):
            of_ranks = ranks.run(measure_speeds, RANKS, model, cpu)
            speeds.append({name: median(rank[name] for rank in of_ranks) for name in of_ranks[0]})
            for shape in shapes[number % len(shapes) :] + shapes[: number % len(shapes)]:
                times = ranks.run(one_step, RANKS, model, shape, cpu)
                step, attention = (fmean(column) for column in zip(*times, strict=True))
                steps[shape].append((step, attention))
    finally:
        ranks.close()
    typical = {name: median(one[name] for one in speeds) for name in speeds[0]}
    return judge(model, steps, typical, len(os.sched_getaffinity(0)), cpu)


def judge(
    model: SmallModel,
    steps: dict[CheckedShape, list[tuple[float, float]]],
    speeds: dict[str, float],
    cores: int,
    cpu: bool = False,
) -> CheckResult:
    """Compares measured times (step, attention) of rounds with predictions from measured speeds."""
    rates = Rates(
        flops=speeds["flops"],
        inside=speeds["link"],
        between=speeds["link"],
        memory=speeds["memory"],
        call=speeds["call"],
        products=speeds["products"] / speeds["flops"],
        block=_BLOCK,
    )
    result = CheckResult(cores, cpu, rates)
    # The other layers of the whole batch, which the ranks share evenly.
    others = 6 * model.parameters * model.layers * model.tokens / speeds["products"]
    for shape, times in steps.items():
        attention = predict_attention(model, shape, rates, turns=cpu or cores < RANKS)
        step, of_attention = (median(column) for column in zip(*times, strict=True))
        result.times.append(
            {
                "name": shape.name,
                "step_s": step,
                "predicted_step_s": attention + others,
                "attention_s": of_attention,
                "predicted_attention_s": attention,
            }
        )
    result.spearman = rank_correlation(
        *([one[name] for one in result.times] for name in ("step_s", "predicted_step_s"))
    )
    result.error = median(
        abs(one["predicted_attention_s"] / one["attention_s"] - 1) for one in result.times
    )
    return result


def predict_attention(model: SmallModel, checked: CheckedShape, rates: Rates, turns: bool) -> float:
    """Seconds of attention of a step, forward and backward, on one of 4 ranks, which take turns or
    have cores of their own.
    """
    plan = _plan(model, checked, RATES)
    calls = checked.cp * model.layers  # microbatches x layers
    report = plan.verify(num_slots=plan.cp)

    def seconds(rates: Rates) -> float:
        return calls * simulate(plan, report, model.sizes, rates, RANKS, KERNELS["cpu"]).both

    if not turns:
        return seconds(rates)
    computed = replace(rates, inside=1e30, between=1e30)
    moved = replace(rates, flops=1e30, memory=1e30, call=1e-30)
    return seconds(computed) + seconds(moved)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation of numbers without ties."""
    first, second = (np.argsort(np.argsort(numbers)) for numbers in (one, other))
    n = len(one)
    return 1 - 6 * float(((first - second) ** 2).sum()) / (n * (n * n - 1))


# On a rank


@RUNTIME.cache()
def _group(cp: int) -> Any:
    """This rank's group of `cp` neighboring ranks. All ranks call it together."""
    return dist.new_subgroups(cp)[0] if cp > 1 else None


def _clock(cpu: bool) -> Callable[[], float]:
    return time.process_time if cpu else time.perf_counter


def one_step(
    group: Any,
    model: SmallModel,
    checked: CheckedShape,
    cpu: bool = False,
) -> tuple[float, float]:
    """Seconds of a step of this rank, and of attention in it."""
    now, step = _clock(cpu), _make_step(model, checked, cpu)
    dist.barrier(group)
    begin = now()
    attention = step()
    dist.barrier(group)
    return now() - begin, attention


@RUNTIME.cache()
def _make_step(model: SmallModel, checked: CheckedShape, cpu: bool) -> Callable[[], float]:
    """A step of `cp` microbatches, which returns the seconds of attention."""
    torch.manual_seed(0)
    hidden, tokens = model.hidden, model.tokens // checked.cp
    plan, group, now = _plan(model, checked, RATES), _group(checked.cp), _clock(cpu)
    shapes = (3 * hidden, hidden), (hidden, hidden), (model.ffn, hidden), (hidden, model.ffn)
    weights = [
        [torch.randn(*shape).mul_(shape[1] ** -0.5).requires_grad_() for shape in shapes]
        for _ in range(model.layers)
    ]
    inputs = torch.randn(1, tokens, hidden)

    def microbatch() -> float:
        begins, ends, x = [], [], inputs
        for wide, out, up, down in weights:
            q, k, v = linear(x, wide).view(1, tokens, 3, model.heads, -1).unbind(2)
            begins.append(now())
            attended = ring_attention(q, k, v, group, plan=plan)
            ends.append(now())
            # backward of attention runs between the gradients of its output and of its inputs
            attended.register_hook(lambda _: begins.append(now()))
            v.register_hook(lambda _: ends.append(now()))
            x = linear(attended.flatten(2), out)
            x = linear(torch.relu(linear(x, up)), down)
        x.sum().backward()
        return sum(ends) - sum(begins)

    return lambda: sum(microbatch() for _ in range(checked.cp))


def measure_speeds(group: Any, model: SmallModel, cpu: bool = False) -> dict[str, float]:
    """What this rank does in a second while all ranks do the same: flops, products, memory, link;
    and call, seconds.
    """
    sizes = model.sizes
    d = model.head_dim
    now = _clock(cpu)
    tokens = model.tokens // 2
    whole = Plan.build(Mask.full(tokens), Layout.contiguous(tokens, 1))

    def seconds(work: Callable[[], object]) -> float:
        return median(timed(work, 3, group=group, clock=now))

    # seven products of matrices, forward and backward
    flops = sizes.heads * d * tokens * tokens * 14.0
    x = torch.randn(tokens, model.hidden, requires_grad=True)
    weight = torch.randn(model.ffn, model.hidden, requires_grad=True)
    gradient = torch.ones(tokens, model.ffn)
    products = 6.0 * tokens * model.hidden * model.ffn
    few = _TINY * RANKS
    tiny = Plan.build(Mask.full(few), Layout.contiguous(few, RANKS), schedule="ring")
    calls = 2 * int(kernel_calls(tiny.ring, KERNELS["cpu"]).max())
    data = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    rank = dist.get_rank(group)
    link = [
        exchange(data, (rank - 1) % RANKS, (rank + 1) % RANKS, group, now, sent=True)
        for _ in range(4)
    ][1:]
    return {
        "flops": flops / seconds(_attention(model, whole, None)),
        "products": products / seconds(lambda: linear(x, weight).backward(gradient)),
        "memory": memory_rate(x.device, 3, 1 << 22, group, now),
        "link": _MESSAGE_BYTES / median(link),
        "call": seconds(_attention(model, tiny, group)) / calls,
    }


def _attention(model: SmallModel, plan: Plan, group: Any) -> Callable[[], object]:
    shape = 1, plan.n // plan.cp, model.heads, model.head_dim
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    gradient = torch.ones(shape)
    return lambda: torch.autograd.grad(
        ring_attention(q, k, v, group, plan=plan), (q, k, v), gradient
    )
