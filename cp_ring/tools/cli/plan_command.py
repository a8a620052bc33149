"""`cp-ring plan`: a plan as a table, as JSON, and as a picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import typer
from rich.console import Console

from cp_ring.errors import PlanError
from cp_ring.plan.costs.shapes import AUTO, Assumed, choose, planned
from cp_ring.plan.exchange.members import members_of_node
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.routes import ROUTES
from cp_ring.tools import lengths as samples
from cp_ring.tools.cli import plan_inputs, plan_recurrent, plan_report, plan_variants
from cp_ring.tools.cli.plan_options import PlanRequest
from cp_ring.tools.cli.terminal import emit

if TYPE_CHECKING:
    from cp_ring.plan.layout import Layout
    from cp_ring.plan.mask import Mask
    from cp_ring.plan.plan import Plan
    from cp_ring.plan.proof.verify import Report
    from cp_ring.plan.ranges import Ints


def run_plan(request: PlanRequest) -> None:
    """Plan the attention of one layer, prove the plan, show its cost, and draw it. Needs no GPU and
    no process group.
    """
    _check(request)
    with _name_options(**{"unknown dtype": "--dtype"}):
        assumed = request.assumed()
    if request.compare:
        if request.lengths is None:
            raise PlanError(
                "--compare needs --lengths: a file, lognormal:MEAN,SIGMA or preset:NAME"
            )
        lengths = samples.lengths(request.lengths, request.seq_length, request.seed)
        plan_variants.compare_command(
            request.lengths, lengths, request.cp, assumed, request.as_json
        )
        return
    n, drawn_offsets = request.seq_length, None
    if request.lengths is not None:
        if request.documents_mean:
            raise PlanError("--lengths and --documents-mean exclude one another: give one of them")
        drawn_offsets = np.cumsum([0, *samples.lengths(request.lengths, n, request.seed)])
        n = int(drawn_offsets[-1]) if n is None else n
    with (
        _name_options_if_out_of_memory(n, request.cp),
        Console(stderr=True).status(f"planning {request.cp} ranks"),
    ):
        with _name_options(documents="--documents-mean: documents"):
            offsets = plan_inputs.document_offsets(n, request.documents_mean, request.seed)
        offsets = offsets if drawn_offsets is None else drawn_offsets
        mask = _make_mask(request, n, offsets)
        if request.convert:
            with _name_options(**{"--layout": "--convert"}):
                _convert(request, mask, offsets, assumed.sizes.element)
        else:
            chunks = request.chunks_per_rank
            layout = plan_inputs.make_layout(request.layout, mask, offsets, request.cp, chunks)
            _show(request, mask, layout, assumed)


def _check(request: PlanRequest) -> None:
    """Raises `PlanError` for options that contradict each other, before anything is made."""
    if request.cp < 1:
        raise PlanError(f"--cp {request.cp}: give the context-parallel ranks, at least 1, or a JOB")
    if request.route not in (AUTO, *ROUTES):
        raise PlanError(f"--route {request.route!r}: known are {', '.join((AUTO, *ROUTES))}")
    if request.draw:
        from cp_ring.tools.cli.drawing import check_ending, check_panel

        check_ending(request.draw)
        check_panel(request.panel, request.width)
    masked = request.mask and request.mask.partition(":")[0] not in plan_recurrent.FORKING
    if request.recurrent and (masked or request.full or request.prefix):
        raise PlanError(
            "--recurrent: a state runs along the sequence and branches of trees: leave out --full, "
            f"--prefix and --mask, but for {' and '.join(plan_recurrent.FORKING)}"
        )
    if request.panel == "states" and not request.recurrent:
        raise PlanError("--panel states needs --recurrent")
    if request.convert and (
        request.compare or (request.layout != "zigzag" and request.job is None)
    ):
        other = "--compare" if request.compare else "--layout"
        raise PlanError(f"--convert {request.convert} names both layouts: leave out {other}")


def _make_mask(request: PlanRequest, n: int | None, offsets: Ints | None) -> Mask:
    text, window, full, prefix = request.mask, request.window, request.full, request.prefix
    if text is None:
        return plan_inputs.plain_mask(n, offsets, window, full, prefix)
    if full or prefix:
        raise PlanError(f"--mask {text} is a mask by itself: leave out --full and --prefix")
    return plan_inputs.make_mask(text, n, window, offsets)


def _convert(request: PlanRequest, mask: Mask, offsets: Ints | None, element: int) -> None:
    before, after = (
        plan_inputs.make_layout(
            name,
            mask,
            offsets,
            request.cp,
            request.chunks_per_rank if plan_inputs.weighs(name) else None,
        )
        for name in plan_variants.names_of(str(request.convert))
    )
    token_bytes = request.heads * request.head_dim * element
    plan_variants.convert_command(
        before, after, token_bytes, request.ranks_per_node, request.as_json, request.draw
    )


def _show(request: PlanRequest, mask: Mask, layout: Layout, assumed: Assumed) -> None:
    """Makes and proves the plan; prints and draws it."""
    with _name_options(schedule="--schedule", slot_shards="--slot-shards", heads="--head-parallel"):
        shape, reason = _shape(request, mask, layout, assumed)
        if ROUTES[shape.route].own_schedule:
            shape = replace(shape, slot_shards=max(request.slot_shards, request.ranks_per_node))
        plan, build_ms = _timed(lambda: planned(mask, request.cp, shape, assumed.rates))
    report, verify_ms = _timed(lambda: plan.verify(request.num_slots))
    shapes = plan_report.shapes_of_plan(
        mask, request.cp, replace(shape, slot_shards=request.slot_shards), assumed
    )
    facts = plan_report.summary(plan, report, assumed, request.num_slots) | {
        "build_ms": build_ms,
        "verify_ms": verify_ms,
        "head_parallel": shape.ulysses,
        "chosen": reason,
        "bytes_between_nodes": {each["name"]: each["bytes_between_nodes"] for each in shapes},
        "predicted": plan_report.times(plan, report, assumed),
        "shapes": shapes,
        "kernel": request.kernel,
        "wire": request.wire,
        "predicted_exposed_seconds": plan_report.exposed(plan, report, assumed),
    }
    chains = plan_recurrent.Chains.of_mask(layout, mask) if request.recurrent else None
    if chains:
        # a member of the ring is `ulysses` ranks, which share its work
        flops = np.repeat(facts["forward_flops_per_rank"], shape.ulysses) / shape.ulysses
        facts["recurrent"] = plan_recurrent.facts(
            str(request.recurrent), chains, assumed, flops.tolist()
        )
    if request.sparse:
        facts["sparse"] = plan_report.sparse_bytes(report, layout, assumed.sizes, request.sparse)
    emit(facts, request.as_json, lambda: plan_report.print_plan(plan.ring, facts))
    if request.draw:
        if request.panel == "states" and chains:
            plan_recurrent.draw_chain(request.draw, chains, request.width)
        else:
            _draw(request, request.draw, plan, report, assumed)
        typer.echo(f"wrote {request.draw}", err=request.as_json)


def _draw(request: PlanRequest, path: str, plan: Plan, report: Report, assumed: Assumed) -> None:
    from cp_ring.tools.cli.drawing import Look, draw

    near = members_of_node(request.ranks_per_node, plan.ulysses)
    sizes = assumed.sizes.of_rank(plan.ulysses)
    draw(plan, path, Look(sizes, assumed.rates, near, request.panel, request.width), report)


def _shape(
    request: PlanRequest,
    mask: Mask,
    layout: Layout,
    assumed: Assumed,
) -> tuple[PlanSpec, str | None]:
    """The shape that was asked for; or the fastest one, and why."""
    text = request.head_parallel
    if text != AUTO and not (text.isdecimal() and int(text)):
        raise PlanError(f"--head-parallel {text!r}: it must be a whole number above 0, or auto")
    heads = text if text == AUTO else int(text)
    if assumed.sizes.codec.latent and heads != 1:
        raise PlanError(
            f"--wire {request.wire} does not support --head-parallel {heads}: latents have no "
            "heads to exchange"
        )
    asked = PlanSpec(
        layout, request.route, request.schedule, 1, request.node_size, request.slot_shards
    )
    if isinstance(heads, int) and request.route != AUTO:
        return replace(asked, ulysses=heads), None
    near = assumed._replace(ranks_per_node=request.node_size)
    return choose([(mask, 1)], request.cp, asked, near, heads)


@contextmanager
def _name_options_if_out_of_memory(n: int | None, cp: int) -> Iterator[None]:
    """Turns `MemoryError` into a `PlanError` that names the options that determine the size of the
    plan.
    """
    try:
        yield
    except MemoryError as error:
        sizes = f"--cp {cp}" if n is None else f"--seq-length {n} --cp {cp}"
        raise PlanError(f"{sizes}: the plan does not fit into memory: {error}") from None


@contextmanager
def _name_options(**options: str) -> Iterator[None]:
    """Turns parameters into their options in a `PlanError` that begins with the name of one of
    them.
    """
    try:
        yield
    except PlanError as error:
        named = str(error)
        if named.startswith(tuple(options)):
            for name, flag in options.items():
                named = named.replace(name, flag, 2 if name == "slot_shards" else 1)
        raise PlanError(named) from None


def _timed[T](make: Callable[[], T]) -> tuple[T, float]:
    """What `make` returns, and the milliseconds that it takes."""
    start = time.perf_counter()
    result = make()
    return result, (time.perf_counter() - start) * 1e3
