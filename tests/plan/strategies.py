"""Random masks, layouts and plans."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from cp_ring.plan import Capabilities, Layout, Mask, RingPlan
from cp_ring.plan.schedule import Schedule

CAPABILITIES = (
    Capabilities(),
    Capabilities(varlen=True),
    Capabilities(narrow_bands=6),
    Capabilities(bands=True),
    Capabilities(bands=True, varlen=True),
)


@st.composite
def masks(draw: st.DrawFn, n: int) -> Mask:
    """Any mask of `n` tokens that the constructors make."""
    window = draw(st.tuples(*[st.one_of(st.just(-1), st.integers(0, 10))] * 2))
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=5)))
    offsets = [0, *cuts] if cuts and draw(st.booleans()) else [0, *cuts, n]
    match draw(st.sampled_from(["full", "causal", "documents", "prefix"])):
        case "full":
            return Mask.full(n, window)
        case "causal":
            return Mask.causal(n, window)
        case "documents":
            return Mask.documents(offsets, causal=draw(st.booleans()), window=window, n=n)
    lengths = [draw(st.integers(0, b - a)) for a, b in pairwise(offsets)]
    return Mask.prefix(n, lengths, offsets, window)


@st.composite
def layouts(draw: st.DrawFn, mask: Mask, cp: int) -> Layout:
    """Any layout of the mask's tokens on `cp` ranks, among them ones with no order at all."""
    n = mask.n
    kinds = ["contiguous", "balanced", "per_document_zigzag", "any"] + ["zigzag"] * (n >= 2 * cp)
    kind = draw(st.sampled_from(kinds))
    if kind == "per_document_zigzag" and n % (2 * cp) == 0:
        cuts = sorted(draw(st.lists(st.integers(0, n // (2 * cp)), max_size=2)))
        return Layout.per_document_zigzag([0, *(2 * cp * cut for cut in cuts), n], cp)
    if kind == "zigzag":
        return Layout.zigzag(n, cp)
    if kind == "balanced":
        return Layout.balanced(mask, cp, draw(st.sampled_from([None, 1])))
    if kind == "any":
        fixed = Layout.contiguous(n, cp)
        owner = draw(st.permutations(range(cp)))
        return Layout(n, cp, fixed.edges, fixed.owner[list(owner)], "any")
    return Layout.contiguous(n, cp)


@st.composite
def schedules(draw: st.DrawFn, cp: int) -> str | Schedule:
    """Any schedule of `cp` ranks, often one of those that have a name."""
    named = draw(st.sampled_from(["auto", "ring", "gather", "any", "any"]))
    if named != "any":
        return named
    hops = [0, 1][:cp]
    while len(hops) < cp:
        hops.append(hops[-1] + draw(st.integers(0, 1)))
    return tuple(hops)


@st.composite
def plans(draw: st.DrawFn, min_cp: int = 1) -> RingPlan:
    """Any plan of up to 9 ranks and 64 tokens."""
    cp = draw(st.integers(min_cp, 9))
    mask = draw(masks(draw(st.integers(cp, 64))))
    layout, route = draw(layouts(mask, cp)), draw(st.sampled_from(["direct", "ring", "relay"]))
    node_size = draw(st.sampled_from([size for size in range(1, cp + 1) if cp % size == 0]))
    return RingPlan.build(mask, layout, route, draw(schedules(cp)) if route != "relay" else "auto", node_size=node_size)
