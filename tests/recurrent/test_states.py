"""States that pass from rank to rank, against one rank's scan in float64, token by token."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cp_ring import Layout, Mask, PlanError
from cp_ring.observe.counters import record
from cp_ring.recurrent.proof import verify
from cp_ring.recurrent.segments import Segments
from cp_ring.recurrent.states import StatePassing
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import error
from tests.recurrences import SIGNATURES, causal_conv1d, delta_rule, scan

HEADS, K, V, WIDTH = 2, 3, 4, 4
CPU = torch.device("cpu")
LAYOUTS = {
    "zigzag": lambda n, cp, starts: Layout.zigzag(n, cp),
    "contiguous": lambda n, cp, starts: Layout.contiguous(n, cp),
    "balanced": lambda n, cp, starts: Layout.balanced(Mask.documents([*starts, n]), cp),
    "single tokens": lambda n, cp, starts: Layout(n, cp, np.arange(n + 1), np.arange(n) * 7 % cp),
}


def drawn(seed: int, cp: int, kind: str) -> tuple[Layout, np.ndarray]:
    """A layout, and where documents begin."""
    random = np.random.default_rng(seed)
    n = int(random.integers(2 * cp, 60))
    starts = np.union1d(random.integers(0, n, random.integers(0, 4)), 0)
    return LAYOUTS[kind](n, cp, starts), starts


def inputs(n: int, by_channel: bool) -> dict[str, Tensor]:
    """Of a layer, float64: x and weight of the convolution, and what the rule takes."""
    keys, values = (n, HEADS, K), (n, HEADS, V)
    gate, write = (keys, values) if by_channel else (keys[:2], keys[:2])
    made = {
        "x": torch.randn(n, 5), "weight": torch.randn(5, WIDTH), "q": torch.randn(keys),
        "k": torch.nn.functional.normalize(torch.randn(keys), dim=-1), "v": torch.randn(values),
        "g": -0.3 * torch.rand(gate), "beta": torch.rand(gate),
    }  # fmt: skip
    if by_channel:
        made |= {"b": made.pop("beta"), "w": torch.rand(write)}
    return {name: x.double() for name, x in made.items()}


def results(given: dict[str, Tensor], convolve, rule) -> dict[str, Tensor]:
    """Outputs, and the gradients of all inputs, of weights that depend on the values alone."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    weight = leaves["weight"]
    tokens = {name: x[None] for name, x in leaves.items() if name not in ("x", "weight")}

    def function(x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return causal_conv1d(x, weight, activation="silu", cu_seqlens=cu_seqlens)[0]

    convolved, out = convolve(function, leaves["x"][None]), rule(delta_rule, **tokens)
    (convolved.sin().sum() + out.sin().sum()).backward()
    found = {f"d{name}": x.grad for name, x in leaves.items()}
    return found | {"convolved": convolved.detach()[0], "out": out.detach()[0]}


def on_one(given: dict[str, Tensor], starts: np.ndarray) -> dict[str, Tensor]:
    offsets = torch.tensor([*starts, len(given["x"])])
    return results(
        given,
        lambda function, x: function(x, offsets),
        lambda function, **tokens: function(**tokens, cu_seqlens=offsets)[0],
    )


def in_ranks(segments: Segments, function) -> list:
    """What `function(passing, group)` returns on each rank."""
    return LocalRing(segments.layout.cp).run(
        lambda group: function(StatePassing(segments, group, CPU), group)
    )


def on_ranks(given: dict[str, Tensor], segments: Segments, kernel=delta_rule, width: int = WIDTH):
    layout = segments.layout

    def case(passing, group):
        mine = {
            name: x.float() if name == "weight" else layout.shard(x, group.rank, 0).float()
            for name, x in given.items()
        }
        return results(
            mine,
            lambda function, x: passing.convolve(function, x, width),
            lambda function, **tokens: passing.delta_rule(kernel, **tokens),
        )

    parts = in_ranks(segments, case)
    whole = {name: layout.unshard([part[name] for part in parts], 0) for name in parts[0]
             if name != "dweight"}  # fmt: skip
    return whole | {"dweight": sum(part["dweight"] for part in parts)}


def off(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    return max(error(ours[name], x) for name, x in truth.items())


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("by_channel", [False, True])
def test_ranks_equal_one_scan(cp, kind, by_channel):
    for seed in range(3):
        layout, starts = drawn(seed + 10 * cp, cp, kind)
        segments, given = Segments.build(layout, starts), inputs(layout.n, by_channel)
        verify(segments, WIDTH)
        assert off(on_ranks(given, segments), on_one(given, starts)) < 1e-6


def mamba_inputs(n: int) -> tuple[Tensor, list[Tensor], dict]:
    """z x B C dt of tokens, the parameters of the kernel, float64, and its other arguments."""
    inner, groups, state = HEADS * V, 1, K
    channels = inner + 2 * groups * state
    params = [
        torch.randn(channels, WIDTH), torch.randn(channels), torch.randn(HEADS), -torch.rand(HEADS),
    ]  # fmt: skip
    x = 0.5 * torch.randn(n, inner + channels + HEADS).double()
    named = {"D": torch.randn(HEADS).double(), "headdim": V, "ngroups": groups}
    return x, [0.5 * param.double() for param in params], named


def mamba_results(x: Tensor, params: list[Tensor], run) -> dict[str, Tensor]:
    leaves = [each.detach().requires_grad_() for each in (x, *params)]
    out = run(leaves[0][None], *leaves[1:])
    out.sin().sum().backward()
    return {"out": out.detach()[0], **{f"d{i}": each.grad for i, each in enumerate(leaves)}}


def mamba_on_ranks(segments: Segments, x: Tensor, params: list[Tensor], named: dict):
    def case(passing, group):
        mine, *own = (each.float() for each in (segments.layout.shard(x, group.rank, 0), *params))
        return mamba_results(mine, own, lambda *given: passing.mamba(scan, *given, **named))

    return in_ranks(segments, case)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_equal_one_scan_of_mamba(cp, kind, seed):
    layout, starts = drawn(seed + 10 * cp, cp, kind)
    x, params, named = mamba_inputs(layout.n)
    numbers = torch.bucketize(torch.arange(layout.n), torch.tensor(starts), right=True) - 1
    truth = mamba_results(x, params, lambda *given: scan(*given, **named, seq_idx=numbers[None]))
    others = named | {"D": named["D"].float()}
    alone = mamba_results(
        x.float(), [each.float() for each in params],
        lambda *given: scan(*given, **others, seq_idx=numbers[None]),
    )  # fmt: skip

    parts = mamba_on_ranks(Segments.build(layout, starts), x, params, others)
    for name, wanted in truth.items():
        each = [part[name] for part in parts]
        ours = layout.unshard(each, 0) if name in ("out", "d0") else sum(each)
        # gradients of the parameters sum over all tokens: in float32 one scan is no nearer
        assert error(ours, wanted) < max(1e-6, 3 * error(alone[name], wanted)), name


def without_decay(*tensors, output_final_state=False, g, **named):
    """Of what a rank hands on, the decay is left out."""
    out, ends = delta_rule(*tensors, g=g, **named)
    if output_final_state:
        ends = delta_rule(*tensors, g=torch.zeros_like(g), output_final_state=True, **named)[1]
    return out, ends


class Wrong(Segments):
    """A plan with one fault."""

    fault = ""

    def gather(self, rank, back=False):
        plan = super().gather(rank, back)
        if self.fault == ("gradient" if back else "state") + " of another rank":
            swap = dataclasses.replace(plan.swap, target=plan.swap.target[::-1].copy())
            return dataclasses.replace(plan, swap=swap)
        return plan

    def halo(self, rank, width):
        return super().halo(rank, width - (self.fault == "halo one short"))


def two_rows() -> tuple[Layout, np.ndarray]:
    """Two batch rows, of which the second has a document inside of a rank's tokens."""
    return Layout.batch([Layout.zigzag(32, 4)] * 2), np.array([0, 32, 49])


def wrong(fault: str) -> Segments:
    layout, starts = two_rows()
    segments = Segments.build(layout, starts[:-1] if fault == "no reset" else starts)
    made = Wrong(*(getattr(segments, field.name) for field in dataclasses.fields(segments)))
    object.__setattr__(made, "fault", fault)
    object.__setattr__(made, "starts", starts)
    return made


@pytest.mark.parametrize(
    "fault",
    ["", "no reset", "state of another rank", "gradient of another rank", "halo one short"],
)
def test_a_planted_fault_shows_in_the_proof_and_in_the_outputs(fault):
    layout, starts = two_rows()
    segments, given = wrong(fault), inputs(layout.n, False)
    if fault:
        with pytest.raises(PlanError, match="rank"):
            verify(segments, WIDTH)
    else:
        verify(segments, WIDTH)
    assert (off(on_ranks(given, segments), on_one(given, starts)) > 1e-3) is bool(fault)


def test_a_decay_left_out_shows():
    layout, starts = two_rows()
    segments, given = Segments.build(layout, starts), inputs(layout.n, False)
    assert off(on_ranks(given, segments, without_decay), on_one(given, starts)) > 1e-3


@pytest.mark.parametrize("field", ["edges", "owner"])
def test_each_number_of_a_plan_is_proven(field):
    layout, starts = two_rows()
    right = Segments.build(layout, starts)
    for place in range(len(right.owner)):
        values = getattr(right, field).copy()
        values[place] += 1
        # of arrays that do not fit together, numpy says so first
        with pytest.raises((PlanError, ValueError, IndexError)):
            verify(dataclasses.replace(right, **{field: values}), WIDTH)


@pytest.mark.parametrize("n", [64, 256])
def test_bytes_are_those_of_maps_and_halos_whatever_the_tokens(n):
    # borders of ranks inside of documents; maps that are needed elsewhere, forward and backward
    for layout, borders, maps in ((Layout.zigzag(n, 4), 6, 30), (Layout.contiguous(n, 4), 3, 12)):
        segments = Segments.build(layout, np.zeros(1, np.int64))
        given = inputs(n, False)
        with record() as counted:
            on_ranks(given, segments)
        # forward and backward, float32
        whole, halo = HEADS * K * (K + V) * 4, (WIDTH - 1) * 5 * 4
        assert counted.bytes_by_kind == {"states": maps * whole, "halo": 2 * borders * halo}


def test_starts_outside_of_the_stream_are_rejected():
    with pytest.raises(PlanError, match="begins at"):
        Segments.build(Layout.zigzag(8, 2), np.array([8]))


@pytest.mark.parametrize("runs", ["cp_ring", "cp_ring.megatron.adapter.recurrent"])
def test_nobody_loads_the_package_without_states(runs):
    code = f"import sys, {runs}; print(*(x for x in sys.modules if 'cp_ring.recurrent' in x))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


@pytest.mark.parametrize(("package", "file", "name"), SIGNATURES)
def test_the_kernels_have_the_signatures_that_calls_are_bound_to(package, file, name):
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(found.submodule_search_locations[0]) / file).read_text())
    (made,) = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name)
    for arg in made.args.args:
        arg.annotation = None
    made.args.kwarg = None
    assert ast.unparse(made.args).replace("=", " = ") == ast.unparse(
        ast.parse(f"lambda {SIGNATURES[package, file, name]}: 0").body[0].value.args
    ).replace("=", " = ")
