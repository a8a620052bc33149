"""Random masks, layouts and plans."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from cp_ring.options import NUM_SLOTS
from cp_ring.plan import OPEN, Capabilities, Layout, Mask, Plan
from cp_ring.plan.tiles import paint

CAPABILITIES = (
    Capabilities(),
    Capabilities(varlen=True),
    Capabilities(bands=True),
    Capabilities(bands=True, varlen=True),
)


@st.composite
def masks(draw, n):
    """Any mask of `n` tokens that the constructors make."""
    window = draw(st.tuples(*[st.one_of(st.just(-1), st.integers(0, 10))] * 2))
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=5)))
    offsets = [0, *cuts] if cuts and draw(st.booleans()) else [0, *cuts, n]
    kinds = """full causal documents prefix pieces tree shared_prefix images global blocks
        blockwise"""
    match draw(st.sampled_from(kinds.split())):
        case "full":
            return Mask.full(n, window)
        case "causal":
            return Mask.causal(n, window)
        case "documents":
            return Mask.documents(offsets, causal=draw(st.booleans()), window=window, n=n)
        case "pieces":
            return Mask.from_pieces(n, draw(disjoint_pieces(n)))
        case "tree":
            lengths = np.diff(offsets)
            parents = [draw(st.integers(-1, branch - 1)) for branch in range(len(lengths))]
            mask = Mask.tree(parents, lengths, n)
            return mask & window if draw(st.booleans()) else mask
        case "shared_prefix":
            prompt, *responses = np.diff(offsets).tolist()
            return Mask.shared_prefix(
                [(prompt, responses)], n, draw(st.sampled_from([None, window]))
            )
        case "images":
            return Mask.images(n, draw(spans(n)))
        case "global":
            return Mask.with_global(n, draw(spans(n)), window, causal=draw(st.booleans()))
        case "blockwise":
            return Mask.blockwise(offsets, causal=draw(st.booleans()), n=n)
        case "blocks":
            block = draw(st.integers(1, n))
            if draw(st.booleans()):
                return Mask.block_causal(n, block, offsets)
            return Mask.block_causal(n, block) if n % 2 else Mask.block_diffusion(n, block)
    lengths = [draw(st.integers(0, b - a)) for a, b in pairwise(offsets)]
    return Mask.prefix(n, lengths, offsets, window)


@st.composite
def disjoint_pieces(draw, n):
    """Up to 12 pieces of any form that do not overlap."""
    taken, kept = np.zeros((n, n), bool), []
    for _ in range(draw(st.integers(1, 12))):
        q0, q1, k0, k1 = (
            edge for end in (n, n) for edge in sorted(draw(st.tuples(*[st.integers(0, end)] * 2)))
        )
        lo = draw(st.one_of(st.just(-OPEN), st.integers(-n, n)))
        hi = draw(st.one_of(st.just(OPEN), st.integers(max(lo, -n), n)))
        pairs = paint([(q0, q1, k0, k1, lo, hi)], n, n) > 0
        if not (pairs & taken).any():
            taken |= pairs
            kept.append((q0, q1, k0, k1, lo, hi))
    return kept


@st.composite
def spans(draw, n):
    """Up to three spans within `n` tokens that do not overlap."""
    edges = sorted(draw(st.sets(st.integers(0, n), max_size=6)))
    return list(zip(edges[0::2], edges[1::2], strict=False))


@st.composite
def layouts(draw, mask, cp):
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
        return Layout.balanced(mask, cp)
    if kind == "any":
        fixed = Layout.contiguous(n, cp)
        owner = draw(st.permutations(range(cp)))
        return Layout(n, cp, fixed.edges, fixed.owner[list(owner)], "any")
    return Layout.contiguous(n, cp)


@st.composite
def schedules(draw, cp):
    """Any schedule of `cp` ranks, often one of those that have a name."""
    named = draw(st.sampled_from(["auto", "ring", "gather", "any", "any"]))
    if named != "any":
        return named
    hops = [0, 1][:cp]
    while len(hops) < cp:
        hops.append(hops[-1] + draw(st.integers(0, 1)))
    return tuple(hops)


@st.composite
def plans(draw, min_cp=1):
    """Any plan of up to 9 ranks and 64 tokens."""
    cp = draw(st.integers(min_cp, 9))
    mask = draw(masks(draw(st.integers(cp, 64))))
    layout, route = draw(layouts(mask, cp)), draw(st.sampled_from(["direct", "ring"]))
    heads = draw(st.sampled_from([heads for heads in range(1, cp + 1) if cp % heads == 0]))
    schedule = draw(schedules(cp // heads))
    return Plan.build(mask, layout, route, schedule, ulysses=heads)


SLOTS = st.integers(*NUM_SLOTS)
