"""States that pass from rank to rank, against one rank's scan in float64, token by token."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from cp_ring import Layout, Mask, PlanError
from cp_ring.comm import state_messages
from cp_ring.comm.states import StatePassing
from cp_ring.observe.counters import record
from cp_ring.plan.exchange.chains import Chains, forks_of
from cp_ring.plan.exchange.verify_chains import verify_chains
from cp_ring.plan.sizes.device_rates import RATES
from cp_ring.testing import delta_rule as chunked
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import error
from tests.recurrences import SIGNATURES, causal_conv1d, delta_rule, paths, scan

HEADS, K, V, WIDTH = 2, 3, 4, 4
CPU = torch.device("cpu")
WAYS = ("chain", "gather", "doublings")
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


def in_ranks(chains: Chains, way: str, function) -> list:
    """What `function(passing, group)` returns on each rank, where states pass in this way."""
    with mock.patch.object(Chains, "way", lambda *_: way):
        return LocalRing(chains.layout.cp).run(
            lambda group: function(StatePassing(chains, group, CPU), group)
        )


def on_ranks(
    given: dict[str, Tensor], chains: Chains, way: str, kernel=delta_rule, width: int = WIDTH
):
    layout = chains.layout

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

    parts = in_ranks(chains, way, case)
    whole = {name: layout.unshard([part[name] for part in parts], 0) for name in parts[0]
             if name != "dweight"}  # fmt: skip
    return whole | {"dweight": sum(part["dweight"] for part in parts)}


def off(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    return max(error(ours[name], x) for name, x in truth.items())


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("by_channel", [False, True])
def test_ranks_equal_one_scan(cp, kind, by_channel):
    for seed, way in enumerate(WAYS):
        layout, starts = drawn(seed + 10 * cp, cp, kind)
        chains, given = Chains.build(layout, starts), inputs(layout.n, by_channel)
        verify_chains(chains, WIDTH)
        assert off(on_ranks(given, chains, way), on_one(given, starts)) < 1e-6


def drawn_tree(seed: int, cp: int, kind: str) -> tuple[Layout, Mask]:
    """A layout of a forest of up to nine branches, some of them short or empty, and padding."""
    random = np.random.default_rng(seed)
    count = int(random.integers(3, 10))
    parents = [int(random.integers(-1, i)) for i in range(count)]
    lengths = random.integers(0, 8, count)
    n = max(int(lengths.sum()) + int(random.integers(0, 5)), 2 * cp)
    mask = Mask.tree(parents, lengths, n)
    # the layout knows edges of branches, not who continues whom
    return LAYOUTS[kind](n, cp, np.unique(np.append(0, np.cumsum(lengths)))[:-1]), mask


def one_by_one(given: dict[str, Tensor], mask: Mask) -> dict[str, Tensor]:
    """As `on_one`: each branch after a path of its own."""

    def convolved(function, x):
        return torch.cat([
            function(x[:, path], torch.tensor([0, len(path)]))[:, -own:] for path, own in paths(mask)
        ], 1)  # fmt: skip

    def ruled(function, **tokens):
        return torch.cat([
            function(**{name: x[:, path] for name, x in tokens.items()})[0][:, -own:]
            for path, own in paths(mask)
        ], 1)  # fmt: skip

    return results(given, convolved, ruled)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_branches_equal_sequences_by_themselves(cp, kind):
    for seed in range(3):
        layout, mask = drawn_tree(seed + 10 * cp, cp, kind)
        chains, given = Chains.of_mask(layout, mask), inputs(layout.n, bool(seed % 2))
        verify_chains(chains, WIDTH)
        assert off(on_ranks(given, chains, "chain"), one_by_one(given, mask)) < 1e-6


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


def mamba_on_ranks(chains: Chains, x: Tensor, params: list[Tensor], named: dict, way: str):
    def case(passing, group):
        mine, *own = (each.float() for each in (chains.layout.shard(x, group.rank, 0), *params))
        return mamba_results(mine, own, lambda *given: passing.mamba(scan, *given, **named))

    return in_ranks(chains, way, case)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_branches_of_mamba_equal_sequences_by_themselves(cp, kind):
    layout, mask = drawn_tree(5 + 10 * cp, cp, kind)
    x, params, named = mamba_inputs(layout.n)
    others = named | {"D": named["D"].float()}

    def alone(x, *params, **named):
        found = [(scan(x[:, path], *params, **named), own) for path, own in paths(mask)]
        return torch.cat([out[:, -own:] for out, own in found], 1)

    truth = mamba_results(x, params, lambda *given: alone(*given, **named))
    short = mamba_results(
        x.float(), [each.float() for each in params], lambda *given: alone(*given, **others)
    )
    parts = mamba_on_ranks(Chains.of_mask(layout, mask), x, params, others, "chain")
    for name, wanted in truth.items():
        each = [part[name] for part in parts]
        ours = layout.unshard(each, 0) if name in ("out", "d0") else sum(each)
        assert error(ours, wanted) < max(1e-6, 3 * error(short[name], wanted)), name


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_equal_one_scan_of_mamba(cp, kind, way):
    layout, starts = drawn(WAYS.index(way) + 10 * cp, cp, kind)
    x, params, named = mamba_inputs(layout.n)
    numbers = torch.bucketize(torch.arange(layout.n), torch.tensor(starts), right=True) - 1
    truth = mamba_results(x, params, lambda *given: scan(*given, **named, seq_idx=numbers[None]))
    others = named | {"D": named["D"].float()}
    alone = mamba_results(
        x.float(), [each.float() for each in params],
        lambda *given: scan(*given, **others, seq_idx=numbers[None]),
    )  # fmt: skip

    parts = mamba_on_ranks(Chains.build(layout, starts), x, params, others, way)
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


class Wrong(Chains):
    """A plan with one fault."""

    fault = ""

    def steps(self, rank):
        plan = super().steps(rank)
        if self.fault == "state of another rank":
            steps = [
                (dataclasses.replace(swap, target=swap.target[::-1].copy()), *rest)
                for swap, *rest in plan.steps
            ]
            return dataclasses.replace(plan, steps=tuple(steps))
        return plan

    def gather(self, rank, back=False):
        plan = super().gather(rank, back)
        if self.fault == ("gradient" if back else "state") + " of another rank":
            first, *rest = plan.swaps
            first = dataclasses.replace(first, target=first.target[::-1].copy())
            return dataclasses.replace(plan, swaps=(first, *rest))
        return plan

    def doublings(self, rank, back=False):
        plan = super().doublings(rank, back)
        if self.fault == ("gradient" if back else "state") + " of another rank":
            return (dataclasses.replace(plan[0], target=plan[0].target[::-1].copy()), *plan[1:])
        return plan

    def halo(self, rank, width):
        return super().halo(rank, width - (self.fault == "halo one short"))


def two_rows() -> tuple[Layout, np.ndarray]:
    """Two batch rows, of which the second has a document inside of a rank's tokens."""
    return Layout.batch([Layout.zigzag(32, 4)] * 2), np.array([0, 32, 49])


def wrong(fault: str) -> Chains:
    layout, starts = two_rows()
    chains = Chains.build(layout, starts[:-1] if fault == "no reset" else starts)
    return with_fault(chains, fault=fault)


def with_fault(chains: Chains, **changes) -> Wrong:
    made = Wrong(*(getattr(chains, field.name) for field in dataclasses.fields(chains)))
    for name, value in changes.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize(
    "fault", ["", "another parent", "no fork", "halo of the branch before", "one branch's gradient"]
)
@pytest.mark.parametrize("cp", [1, 3])
def test_a_planted_fault_of_branches_shows(cp, fault, monkeypatch):
    mask = Mask.tree([-1, 0, 0, 0, 1], [9, 4, 5, 6, 3])
    layout, forks = Layout.zigzag(mask.n, cp), forks_of(mask)
    chains, starts = Chains.of_mask(layout, mask), np.zeros(1, np.int64)
    given = inputs(mask.n, False)
    if fault == "another parent":
        chains = Chains.build(layout, starts, np.stack([forks[0], [8, 12, 12, 12]]))
    if fault == "no fork":
        chains = Chains.build(layout, np.append(starts, forks[0]))
    if fault == "halo of the branch before":
        other = Chains.build(layout, starts, np.stack([forks[0], forks[0] - 1]))
        chains = with_fault(chains, halo=other.halo)
    if fault == "one branch's gradient":
        monkeypatch.setattr(state_messages, "_added", lambda x, *of: x.index_copy_(0, *of))
    object.__setattr__(chains, "starts", starts)
    object.__setattr__(chains, "forks", forks)
    if fault and "gradient" not in fault:
        with pytest.raises(PlanError, match="rank"):
            verify_chains(chains, WIDTH)
    else:
        verify_chains(chains, WIDTH)
    apart = off(on_ranks(given, chains, "chain"), one_by_one(given, mask))
    assert apart > 1e-3 if fault else apart < 1e-6


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "fault",
    ["", "no reset", "state of another rank", "gradient of another rank", "halo one short"],
)
def test_a_planted_fault_shows_in_the_proof_and_in_the_outputs(fault, way):
    layout, starts = two_rows()
    chains, given = wrong(fault), inputs(layout.n, False)
    object.__setattr__(chains, "starts", starts)
    if fault:
        with pytest.raises(PlanError, match="rank"):
            verify_chains(chains, WIDTH)
    else:
        verify_chains(chains, WIDTH)
    if way == "chain" and fault.startswith("gradient"):
        return  # gradients of a chain go back as the states came
    assert (off(on_ranks(given, chains, way), on_one(given, starts)) > 1e-3) is bool(fault)


@pytest.mark.parametrize("way", WAYS)
def test_a_decay_left_out_shows(way):
    layout, starts = two_rows()
    chains, given = Chains.build(layout, starts), inputs(layout.n, False)
    assert off(on_ranks(given, chains, way, without_decay), on_one(given, starts)) > 1e-3


@pytest.mark.parametrize("field", ["edges", "owner", "parent"])
def test_each_number_of_a_plan_is_proven(field):
    layout, starts = two_rows()
    right = Chains.build(layout, starts)
    for place in range(len(right.owner)):
        values = getattr(right, field).copy()
        values[place] += -1 if field == "parent" and values[place] >= 0 else 1
        # of arrays that do not fit together, numpy says so first
        with pytest.raises((PlanError, ValueError, IndexError)):
            verify_chains(dataclasses.replace(right, **{field: values}), WIDTH)


@pytest.mark.parametrize("n", [64, 256])
@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_those_of_the_plan_whatever_the_tokens(n, way):
    # states of a chain; maps that are needed elsewhere, forward and backward
    for layout, links, maps in ((Layout.zigzag(n, 4), 6, 30), (Layout.contiguous(n, 4), 3, 12)):
        chains = Chains.build(layout, np.zeros(1, np.int64))
        given = inputs(n, False)
        with record() as counted:
            on_ranks(given, chains, way)
        assert chains.links == links
        # forward and backward, float32
        state, whole, halo = HEADS * K * V * 4, HEADS * K * (K + V) * 4, (WIDTH - 1) * 5 * 4
        states = 2 * links * state if way == "chain" else maps * whole
        assert counted.bytes_by_kind == {"states": states, "halo": 2 * links * halo}
        assert chains.bytes(state, whole, way) == states
        assert chains.halo_tokens(WIDTH) == links * (WIDTH - 1)


def test_a_rank_gets_the_state_of_a_parent_once_for_all_branches():
    mask = Mask.shared_prefix([(16, [4] * 12)])
    chains = Chains.of_mask(Layout.contiguous(mask.n, 4), mask)
    given = inputs(mask.n, False)
    with record() as counted:
        on_ranks(given, chains, "chain")
    assert chains.links == 3 and int(chains.depth.max()) == 1
    state, halo = HEADS * K * V * 4, (WIDTH - 1) * 5 * 4
    assert counted.bytes_by_kind == {"states": 2 * 3 * state, "halo": 2 * 12 * halo}
    assert chains.bytes(state, 2 * state, "chain") == 2 * 3 * state
    assert chains.halo_tokens(WIDTH) == 12 * (WIDTH - 1)


@pytest.mark.parametrize(
    ("heads", "cp", "near", "way"),
    [
        (1, 4, 8, "gather"), (32, 4, 8, "chain"), (1, 2, 8, "chain"), (1, 4, 1, "gather"),
        (16, 4, 1, "chain"), (4, 16, 8, "doublings"), (32, 64, 8, "doublings"),
    ],
)  # fmt: skip
def test_the_way_is_the_one_that_is_predicted_to_be_faster(heads, cp, near, way):
    """States of 64 KiB a head: small ones at once, large ones border by border, and by doublings
    where there are many borders.
    """
    chains, state = Chains.build(Layout.zigzag(4096, cp), np.zeros(1, np.int64)), heads << 16
    found = chains.seconds(state, 2 * state, RATES, near)
    if near >= cp or near == 1:
        bandwidth, steps = RATES.inside if near > 1 else RATES.between, 2 * cp - 2
        assert found["chain"] == pytest.approx(steps * (RATES.call + state / bandwidth))
        # rank 0, which holds the first and the last tokens, needs all maps but its own
        assert found["gather"] == pytest.approx(RATES.call + (2 * cp - 3) * 2 * state / bandwidth)
    assert chains.way(state, 2 * state, RATES, near) == way


def test_maps_double_the_segments_of_which_they_are():
    chains = Chains.build(Layout.contiguous(800, 8), np.zeros(1, np.int64))
    found = chains.seconds(1000, 2000, RATES, 8)
    # 1, then 2, 4 and 7 segments; in each step a rank gets one map at most
    assert found["doublings"] == pytest.approx(4 * (RATES.call + 2000 / RATES.inside))
    assert chains.bytes(1000, 2000, "doublings") == 2 * 2000 * (7 + 6 + 5 + 3)


def test_a_branch_follows_the_end_of_the_one_that_it_continues() -> None:
    tree = Mask.tree([-1, 0, 0, 1, -1, 4, 4, 4], [5, 3, 2, 4, 3, 0, 2, 2], 30)
    assert forks_of(tree).tolist() == [[5, 8, 10, 17, 19], [4, 4, 7, 16, 16]]
    batch = Mask.batch(
        [Mask.documents([0, 2, 5]), Mask.shared_prefix([(2, [3, 1])], window=(1, 0))]
    )
    assert forks_of(batch).tolist() == [[7, 10], [6, 6]]
    assert not forks_of(Mask.causal(3)).size and not forks_of(Mask.block_diffusion(8, 2)).size
    for other in (
        Mask.from_pieces(5, [(0, 5, 0, 5)], positions=[0, 1, 1, 2, 2]),
        Mask.shared_prefix([(2, [3, 1])], window=(0, 0)),
    ):
        with pytest.raises(PlanError, match=r"token 2 at position .* follows none at"):
            forks_of(other)


def test_starts_outside_of_the_stream_are_rejected():
    with pytest.raises(PlanError, match="begins at"):
        Chains.build(Layout.zigzag(8, 2), np.array([8]))
    with pytest.raises(PlanError, match="fork at"):
        Chains.build(Layout.zigzag(8, 2), np.array([0]), np.array([[3], [3]]))


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


@pytest.mark.parametrize("lengths", [[1, 200, 63], [64], [7, 128]])
def test_chunks_are_the_recurrence_token_by_token(lengths):
    n, offsets = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    given = inputs(n, False)
    tokens = {name: given[name][None] for name in ("q", "k", "v", "g", "beta")}
    more = {
        "initial_state": torch.randn(len(lengths), HEADS, K, V).double(),
        "output_final_state": True, "cu_seqlens": offsets,
    }  # fmt: skip
    for ours, wanted in zip(
        chunked.gated_delta_rule(**tokens, **more), delta_rule(**tokens, **more), strict=True
    ):
        torch.testing.assert_close(ours, wanted)
    ours = chunked.causal_conv1d(given["x"][None], given["weight"], offsets)
    wanted, _ = causal_conv1d(
        given["x"][None], given["weight"], activation="silu", cu_seqlens=offsets
    )
    torch.testing.assert_close(ours, wanted)
