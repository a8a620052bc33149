"""States that pass from rank to rank, against scans of whole branches on one rank in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cp_ring import Layout, Mask, PlanError
from cp_ring.observe.counters import record
from cp_ring.recurrent.pieces import Pieces
from cp_ring.recurrent.proof import verify
from cp_ring.recurrent.scans import DeltaRule, MambaScan
from cp_ring.recurrent.states import StatePassing
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import error
from tests.recurrences import causal_conv1d, chunk_scan, delta_rule

HEADS, K, V, WIDTH = 2, 3, 4, 4
LAYOUTS = {
    "zigzag": lambda n, cp, starts: Layout.zigzag(n, cp),
    "contiguous": lambda n, cp, starts: Layout.contiguous(n, cp),
    "balanced": lambda n, cp, starts: Layout.balanced(Mask.documents([*starts, n]), cp),
    "single tokens": lambda n, cp, starts: Layout(n, cp, np.arange(n + 1), np.arange(n) * 7 % cp),
}
GATES = {
    "gated delta net": {"g": (), "beta": ()},
    "KDA": {"g": (K,), "beta": ()},
    "gated delta net 2": {"g": (K,), "b": (K,), "w": (V,)},
    "gated delta product": {"g": (), "beta": ()},
}
MIXERS = [*GATES, "Mamba 2"]


def drawn(seed, cp, kind, branches=False):
    """A layout, and where documents or branches begin, with the token that each continues."""
    random = np.random.default_rng(seed)
    n = int(random.integers(2 * cp, 50))
    starts = np.union1d(random.integers(0, n, random.integers(0, 5)), [0, *[n - 1] * (seed % 2)])
    before = np.full_like(starts, -1)
    for i in range(1, len(starts) * branches):
        before[i] = random.choice([-1, *(starts[1 : i + 1] - 1)])
    return LAYOUTS[kind](n, cp, starts), starts, before


def inputs(mixer, n):
    """x [n, d] and weight of a convolution, whose outputs are the values, and the other inputs of
    the recurrence, float64.
    """
    rules = (2,) if mixer == "gated delta product" else ()
    size = *rules, HEADS, V
    made = {"conv": torch.randn(n, np.prod(size)), "weight": torch.randn(np.prod(size), WIDTH)}
    if mixer == "Mamba 2":
        made |= {"z": torch.randn(n, HEADS, V), "dt": torch.randn(n, HEADS)}
        made |= {name: torch.randn(n, 1, K) for name in "BC"}
    else:
        made |= {"q": torch.randn(n, HEADS, K), "k": torch.randn(n, *rules, HEADS, K)}
        made["k"] = F.normalize(made["k"], dim=-1)
        for name, channels in GATES[mixer].items():
            gate = torch.rand(n, *(rules if name != "g" else ()), HEADS, *channels)
            made[name] = -0.3 * gate if name == "g" else gate
    return {name: x.double() for name, x in made.items()}, size


def recurrence(mixer):
    if mixer != "Mamba 2":
        return DeltaRule(delta_rule)
    a, bias, d = torch.tensor([[-0.5, -2], [0.3, -0.1], [1, 2]], dtype=torch.float64)
    return MambaScan(chunk_scan, bias, a, D=d, chunk_size=None)


def results(given, run):
    """What `run` returns for the inputs, and the gradients of all inputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    out = run(**leaves)
    (out.sin() * out).sum().backward()
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def convolution(weight):
    return lambda x: causal_conv1d(x, weight, activation="silu")[0]


def on_ranks(mixer, given, size, pieces):
    layout = pieces.layout

    def case(group):
        passing = StatePassing(pieces, group, torch.device("cpu"))

        def run(conv, weight, **more):
            values = passing.convolve(convolution(weight), conv, weight, None, F.silu)
            more["x" if mixer == "Mamba 2" else "v"] = values.reshape(-1, *size)
            return passing.scan(recurrence(mixer), more)

        own = {
            name: x if name == "weight" else layout.shard(x, group.rank, 0)
            for name, x in given.items()
        }
        return results(own, run)

    parts = LocalRing(layout.cp).run(case)
    whole = {
        name: layout.unshard([part[name] for part in parts], 0) for name in parts[0]
        if name != "weight"
    }  # fmt: skip
    return whole | {"weight": sum(part["weight"] for part in parts)}


def on_one(mixer, given, size, starts, before):
    """Each branch is scanned behind all of its ancestors."""
    ends, paths = [*starts[1:], len(given["conv"])], []
    for start, end, last in zip(starts, ends, before, strict=True):
        above = paths[np.searchsorted(starts, last, "right") - 1] if last >= 0 else []
        paths.append([*above, *range(start, end)])

    def run(conv, weight, **more):
        outs = []
        for path, start, end in zip(paths, starts, ends, strict=True):
            values = convolution(weight)(conv[path][None])[0].reshape(-1, *size)
            own = {name: x[path] for name, x in more.items()}
            own["x" if mixer == "Mamba 2" else "v"] = values
            out, _ = recurrence(mixer).scan(own, np.array([len(path)]), None, False)
            outs.append(out[start - end :])
        return torch.cat(outs)

    return results(given, run)


def off(ours, truth):
    return max(error(ours[name], x) for name, x in truth.items())


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_ranks_equal_one_scan_of_each_branch(mixer, kind, branches):
    sizes = (1, 2, 3, 4, 8)  # each with each mixer and each layout
    first = MIXERS.index(mixer) + [*LAYOUTS].index(kind)
    for seed in (first % 5, (first + 2) % 5):
        layout, starts, before = drawn(seed, sizes[seed], kind, branches)
        pieces = Pieces.of(layout, starts, before)
        verify(pieces, starts, before, WIDTH)
        given, size = inputs(mixer, layout.n)
        ours = on_ranks(mixer, given, size, pieces)
        assert off(ours, on_one(mixer, given, size, starts, before)) < 1e-12


def plan(n=64, cp=4):
    """Two batch rows; the second has a document that begins inside of a rank's tokens, and a branch
    that continues another row's document.
    """
    layout = Layout.batch([Layout.zigzag(n // 2, cp)] * 2)
    starts, before = np.array([0, n // 2, n - 11, n - 5]), np.array([-1, -1, -1, n // 2 - 1])
    return Pieces.of(layout, starts, before), starts, before


def changed(pieces, **values):
    """A plan with other rounds or halos."""
    made = replace(pieces)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def without_a_border(pieces):
    starts = np.array([0, 32, 59])
    return Pieces.of(pieces.layout, starts, np.array([-1, -1, 31]))


def from_a_sibling(pieces):
    parent = pieces.parent.copy()
    parent[-1] -= 1
    return replace(pieces, parent=parent)


def one_round_less(pieces):
    return changed(pieces, rounds=pieces.rounds[:-1])


def of_another_piece(pieces):
    first, *more = pieces.rounds
    return changed(pieces, rounds=(replace(first, place=first.place[::-1]), *more))


def halo_one_short(pieces):
    def halo(width):
        right = Pieces.halo(pieces, width)
        return replace(right, place=np.where(np.arange(width - 1) < width - 2, right.place, -1))

    return changed(pieces, halo=halo)


FAULTS = (without_a_border, from_a_sibling, one_round_less, of_another_piece, halo_one_short)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows_in_the_proof_and_in_the_outputs(fault):
    right, starts, before = plan()
    given, size = inputs("gated delta net", right.layout.n)
    wrong = fault(right)
    with pytest.raises(PlanError, match=r"rank|recurrent layers"):
        verify(wrong, starts, before, WIDTH)
    try:
        ours = on_ranks("gated delta net", given, size, wrong)
    except (IndexError, RuntimeError):
        return
    assert off(ours, on_one("gated delta net", given, size, starts, before)) > 1e-3


def spoiled(values):
    """The same numbers but for one, each in turn."""
    for place in range(len(values)):
        other = values.copy()
        other[place] += 1
        yield other


def spoiled_moves(moves):
    for name in ("sender", "receiver", "source", "target", "tokens"):
        for values in spoiled(getattr(moves, name)):
            yield replace(moves, **{name: values})


def test_each_number_of_a_plan_is_proven():
    right, starts, before = plan()
    verify(right, starts, before, WIDTH)
    wrong = [
        replace(right, **{name: values})
        for name in ("start", "end", "owner", "parent") for values in spoiled(getattr(right, name))
    ]  # fmt: skip
    for number, each in enumerate(right.rounds):
        others = [replace(each, moves=moves) for moves in spoiled_moves(each.moves)]
        for name in ("piece", "place"):
            values = spoiled(getattr(each, name))
            others += [replace(each, **{name: other}) for other in values]
        rounds = [list(right.rounds) for _ in others]
        for of_round, other in zip(rounds, others, strict=True):
            of_round[number] = other
        wrong += [changed(right, rounds=tuple(of_round)) for of_round in rounds]
    halo = right.halo(WIDTH)
    halos = [replace(halo, moves=moves) for moves in spoiled_moves(halo.moves)]
    halos += [replace(halo, leaving=leaving) for leaving in spoiled(halo.leaving)]
    halos += [
        replace(halo, place=place.reshape(halo.place.shape))
        for place in spoiled(halo.place.reshape(-1))
    ]
    wrong += [changed(right, halo=lambda width, halo=halo: halo) for halo in halos]
    for each in wrong:
        # of arrays that do not fit together, numpy says so first
        with pytest.raises((PlanError, ValueError, IndexError)):
            verify(each, starts, before, WIDTH)


def sent(moves):
    """How many maps ranks send."""
    return moves.tokens[moves.sender != moves.receiver].sum()


def test_only_documents_on_several_ranks_send_and_as_much_as_the_plan_says():
    for starts, rounds in (([0], [14, 13, 11, 9, 5]), (range(0, 64, 4), [])):
        pieces = Pieces.of(Layout.zigzag(64, 8), list(starts), [-1] * len(starts))
        given, size = inputs("gated delta net", 64)
        with record() as counted:
            on_ranks("gated delta net", given, size, pieces)
        maps, halos = HEADS * K * (K + V) * 8 * sum(rounds), 14 * (WIDTH - 1) * HEADS * V * 8
        kinds = {"states": maps, "states gradients": maps, "halo": halos, "halo gradients": halos}
        assert counted.bytes_by_kind == (kinds if rounds else {})
        assert [sent(each.moves) for each in pieces.rounds] == rounds


def test_64_ranks_pass_states_that_two_heads_could_not_share():
    starts, before = np.array([0, 100, 101]), np.full(3, -1)
    pieces = Pieces.of(Layout.zigzag(256, 64), starts, before)
    verify(pieces, starts, before, WIDTH)
    given, size = inputs("gated delta net", 256)
    ours, again = (on_ranks("gated delta net", given, size, pieces) for _ in range(2))
    assert off(ours, on_one("gated delta net", given, size, starts, before)) < 1e-12
    assert all(torch.equal(ours[name], x) for name, x in again.items())


@pytest.mark.parametrize(
    ("starts", "before"),
    [
        ([0, 8], [-1, -1]),
        ([0, 4, 4], [-1] * 3),
        ([], []),
        ([1], [-1]),
        ([0, 4], [-1, 5]),
        ([0, 4], [-1, -2]),
    ],
)
def test_starts_outside_of_the_stream_and_branches_before_their_trunk_are_rejected(starts, before):
    with pytest.raises(PlanError, match="starts must ascend"):
        Pieces.of(Layout.zigzag(8, 2), starts, before)
