"""Queries and keys of different length: cross attention, and decoding with a cache of keys, against
dense scores in float64.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from cp_ring import LatentKeys, Layout, Mask, Plan, ring_attention, shard
from cp_ring.errors import ConfigError, PlanError
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, brute_force
from tests.rings import FLOAT32, off, rank_of, truth

N, KEYS = 24, 40
RNG = np.random.default_rng(0)
MASKS = {
    "causal": Mask.causal(N, keys=KEYS),
    "window": Mask.full(N, (9, 3), KEYS),
    "documents": Mask.documents([0, 5, 17, 24], cu_seqlens_k=[0, 9, 12, 40]),
    "dense": Mask.from_dense(RNG.random((N, KEYS)) < 0.4),
}
SINK = torch.tensor([-1.0, 0.0, 0.5, 3.0])
OPTIONS = (
    {},
    {"route": "ring", "schedule": "ring"},
    {"heads": 2},
    {"heads": 4, "sink": SINK},
)


def draw(n: int = N, keys: int = KEYS, **sizes: int) -> Case:
    queries, of_keys = Case.draw(n, e=12, **sizes), Case.draw(keys, e=12, seed=1, **sizes)
    return Case(queries.q, of_keys.k, of_keys.v, queries.dout)


def part(layout: Layout | str, x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.clone() if isinstance(layout, str) else layout.shard(x, rank, 1)


def on_rank(group, case, layouts, sink=None, **options):
    """Out and gradients of a rank's queries and keys."""
    rank = rank_of(group)
    split = (layouts[0], layouts[1], layouts[1], layouts[0])
    q, k, v, dout = (part(layout, x, rank) for layout, x in zip(split, case, strict=True))
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink) if x is not None]
    options |= {} if sink is None else {"sink": leaves[3]}
    out = ring_attention(*leaves[:3], group, layout=layouts[0], key_layout=layouts[1], **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def joined(layouts, parts):
    """Those of the whole sequences; replicated ones must be equal on all ranks."""
    columns, split = (
        list(zip(*parts, strict=True)),
        [layouts[0], layouts[0], layouts[1], layouts[1]],
    )
    for layout, column in zip(split, columns, strict=False):
        assert not isinstance(layout, str) or all(torch.equal(x, column[0]) for x in column)
    found = [
        column[0] if isinstance(layout, str) else layout.unshard(list(column), 1)
        for layout, column in zip(split, columns, strict=False)
    ]
    return found + [sum(column) for column in columns[4:]]


def wanted(case: Case, mask: Mask, sink=None, **_):
    if sink is None:
        return brute_force(case, mask.dense())
    return truth(case, mask.dense(), sink)


QUICK = [(1, "causal"), (2, "documents"), (3, "dense"), (4, "window"), (8, "causal")]


@pytest.mark.parametrize(
    ("cp", "name"),
    [
        each if each in QUICK else pytest.param(*each, marks=pytest.mark.slow)
        for each in product([1, 2, 3, 4, 8], MASKS)
    ],
)
def test_equals_dense_scores(cp, name):
    mask, ring, case = MASKS[name], LocalRing(cp), draw(b=2)
    uneven = Layout.from_lengths(
        np.arange(cp) % 3 + [(KEYS - (np.arange(cp) % 3).sum()) // cp] * cp
    )
    keys = [uneven] if uneven.n == KEYS else [Layout.contiguous(KEYS, cp)]
    for layout in (Layout.balanced(mask, cp), Layout.contiguous(N, cp), "replicated"):
        for options in OPTIONS:
            heads = options.get("heads", 1)
            if cp % heads or (layout == "replicated" and heads > 1):
                continue
            layouts = layout, keys[0]
            parts = ring.run(on_rank, case, layouts, mask=mask, **options)
            found = joined(layouts, parts)
            assert off(found, wanted(case, mask, **options)) < FLOAT32, (layout, options)


def test_on_processes(pool):
    case = draw()
    for layouts in ((Layout.zigzag(N, 4), Layout.zigzag(KEYS, 4)), ("replicated", "contiguous")):
        given = (layouts[0], Layout.contiguous(KEYS, 4)) if layouts[1] == "contiguous" else layouts
        found = joined(given, pool.run(on_rank, 4, case, given, mask=MASKS["causal"]))
        assert off(found, brute_force(case, MASKS["causal"].dense())) < FLOAT32


@pytest.mark.parametrize(
    ("keywords", "mask"),
    [
        ({}, Mask.full(N, keys=KEYS)),
        ({"causal": True, "window_size": (20, -1)}, Mask.causal(N, (20, 0), KEYS)),
        (
            {"cu_seqlens": [0, 5, 17, 24], "cu_seqlens_k": [0, 9, 12, 40], "causal": True},
            MASKS["documents"],
        ),
    ],
)
def test_keywords_name_the_mask(keywords, mask):
    """Without a mask, tensors of other lengths say that keys are of their own."""
    case, ring = draw(), LocalRing(2)

    def one(group, layout="zigzag", dim=1, form="bshd"):
        named = {} if layout == "zigzag" else {"layout": layout}
        q = case.q if named else shard(case.q, None, group)
        k, v = (shard(x, "contiguous" if named else None, group) for x in case[1:3])
        q, k, v = (x[0] if form == "thd" else x for x in (q, k, v))
        out = ring_attention(q, k, v, group, qkv_format=form, **named, **keywords)
        return [out[None] if form == "thd" else out]

    for form in ("bshd", "thd"):
        outs = ring.run(one, form=form)
        whole = Layout.zigzag(N, 2).unshard([out for (out,) in outs], 1)
        expected = brute_force(case, mask.dense()).out
        assert off([whole], [expected]) < FLOAT32
    assert off(ring.run(one, "replicated")[0], [expected]) < FLOAT32


def test_decoding_goes_on_where_the_keys_end():
    """A cache of keys that grows by a token: each step is the next query of a causal call."""
    case, cp = Case.draw(12), 3
    expected = brute_force(case, Mask.causal(12).dense()).out
    for have in (9, 10, 11):
        held = Layout.from_lengths([4, 3, have - 7])  # the last rank takes new tokens
        place = have - 1
        q, keys = case.q[:, place : place + 1], [x[:, :have] for x in case[1:3]]

        def step(group, q=q, keys=keys, held=held):
            mine = [held.shard(x, group.rank, 1) for x in keys]
            options = {"layout": "replicated", "key_layout": held, "causal": True}
            return [ring_attention(q, *mine, group, **options)]

        for found in LocalRing(cp).run(step):
            assert off(found, [expected[:, place : place + 1]]) < FLOAT32


def test_batch_rows_with_masks_of_their_own():
    rows = [Mask.causal(8, keys=12), Mask.full(8, (3, 1), 12)]
    case, cp = draw(8, 12, b=2), 2
    expected = [
        brute_force(Case(*(x[[i]] for x in case)), row.dense()) for i, row in enumerate(rows)
    ]
    of_row = Layout.zigzag(8, cp), Layout.zigzag(12, cp)
    layout, keys = (Layout.batch([each] * 2) for each in of_row)
    for given in (layout, "replicated"):

        def one(group, given=given):
            q, dout = (
                x if given == "replicated" else of_row[0].shard(x, group.rank, 1)
                for x in (case.q, case.dout)
            )
            k, v = (of_row[1].shard(x, group.rank, 1) for x in case[1:3])
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            options = {"mask": Mask.batch(rows), "layout": given, "key_layout": keys}
            out = ring_attention(*leaves, group, **options)
            return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

        split = given if given == "replicated" else of_row[0], of_row[1]
        found = joined(split, LocalRing(cp).run(one))
        rowwise = [torch.cat([row[i] for row in expected]) for i in range(4)]
        assert off(found, rowwise) < FLOAT32


def test_the_losses_of_ranks_with_replicated_queries_are_averaged():
    case, layouts = draw(), ("replicated", Layout.contiguous(KEYS, 2))

    def one(group):
        rank_loss = case._replace(dout=case.dout * (4.0 if group.rank else 0.0))
        return on_rank(group, rank_loss, layouts)

    found = joined(layouts, LocalRing(2).run(one))
    expected = brute_force(case._replace(dout=2 * case.dout), np.ones((N, KEYS), bool))
    assert off(found, expected) < FLOAT32


def test_the_latent_codec_sends_latents_of_the_keys():
    torch.manual_seed(0)
    latent, rope = torch.randn(1, KEYS, 6), torch.randn(1, KEYS, 4)
    weight, q = torch.randn(4 * 20, 6), torch.randn(1, N, 4, 12)  # key 8 and 4, value 12
    layouts = Layout.zigzag(N, 2), Layout.zigzag(KEYS, 2)

    def one(group):
        mine = [layouts[1].shard(x, group.rank, 1) for x in (latent, rope)]
        keys = LatentKeys(*mine, weight, 4, 8)
        options = dict(zip(("layout", "key_layout"), layouts, strict=True))
        mask = MASKS["causal"]
        return ring_attention(
            layouts[0].shard(q, group.rank, 1), keys, None, group, mask=mask, **options
        )

    k, v = LatentKeys(latent, rope, weight, 4, 8).expand()
    case = Case(q, k, v, torch.zeros(1, N, 4, v.shape[-1]))
    expected = brute_force(case, MASKS["causal"].dense()).out
    assert off([layouts[0].unshard(LocalRing(2).run(one), 1)], [expected]) < FLOAT32


CROSS, SELF = Mask.causal(N, keys=KEYS), Mask.causal(N)
KEY_LAYOUT = Layout.zigzag(KEYS, 1)


@pytest.mark.parametrize(
    ("make", "kind", "line"),
    [
        (lambda: Plan.build(SELF, Layout.zigzag(N, 2), key_layout=Layout.zigzag(N, 2)), PlanError,
            "key_layout is for a mask with keys of their own, as Mask.causal"),
        (lambda: Plan.build(CROSS, Layout.zigzag(N, 2)), PlanError, "key_layout is missing: layout"),
        (lambda: Plan.build(CROSS, Layout.zigzag(N, 2), key_layout=Layout.zigzag(KEYS, 4)),
            PlanError, "key_layout is for 4 ranks, not for 2"),
        (lambda: Plan.build(CROSS, Layout.zigzag(N, 2), key_layout=Layout.zigzag(N, 2)), PlanError,
            "the mask has 40 keys in 1 batch rows, key_layout is for 24 in 1"),
        (lambda: Plan.build(CROSS, "replicated", key_layout=Layout.zigzag(KEYS, 4), ulysses=2),
            PlanError, "heads=2: where every rank holds all queries"),
        (lambda: Plan.build(SELF, "replicated", key_layout=Layout.zigzag(N, 2)), PlanError,
            "layout='replicated' is for a mask with keys of their own"),
        (lambda: Mask.documents([0, 4, 8], cu_seqlens_k=[0, 8]), PlanError,
            "cu_seqlens_k has 1 documents, cu_seqlens 2: the queries of a document"),
        (lambda: Mask.batch([CROSS, SELF]), PlanError, "all or none have keys of their own"),
        (lambda: Mask.union(CROSS, SELF), PlanError, "of 24 queries and 40 keys, 24 tokens: they"),
        (lambda: Mask.from_pieces(8, [(0, 8, 0, 9)], keys=8), PlanError, "outside the 8 tokens"),
        (lambda: Mask.from_pieces(8, [(0, 8, 0, 9)], keys=7), PlanError,
            "outside the 8 queries and 7 keys of the mask"),
        (lambda: CROSS.allowed(0, 40), PlanError, "outside the 24 queries and 40 keys"),
        (lambda: ring_attention(*draw()[:3], mask=SELF), ConfigError,
            "the sequence has 24 tokens, of which rank 0 of 1 holds 24, but k has 40"),
        (lambda: ring_attention(*draw()[:3], layout=Layout.zigzag(N, 1)), PlanError, "key_layout is"),
        (lambda: ring_attention(*draw()[:3], mask=CROSS, key_layout=3), ConfigError, "key_layout"),
        (lambda: ring_attention(*draw()[:3], mask=CROSS, key_layout="grid"), PlanError,
            "key_layout='grid': unknown"),
        (lambda: ring_attention(*draw()[:3], mask=CROSS, cu_seqlens_k=[0, 40]), ConfigError,
            "cu_seqlens_k and mask are both given"),
        (lambda: ring_attention(*draw()[:3], plan=Plan.build(SELF, Layout.zigzag(N, 1))), PlanError,
            "batch sizes and tokens must agree"),
        (lambda: ring_attention(*draw(20)[:3],
            plan=Plan.build(CROSS, Layout.zigzag(N, 1), key_layout=KEY_LAYOUT)), PlanError,
            "rank 0 holds 24 tokens of the layout, but q has 20"),
        (lambda: ring_attention(*draw(keys=20)[:3],
            plan=Plan.build(CROSS, Layout.zigzag(N, 1), key_layout=KEY_LAYOUT)), PlanError,
            "rank 0 holds 40 tokens of the key_layout, but k and v have 20"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(make, kind, line):
    with pytest.raises(kind) as caught:
        make()
    assert line in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_positions_and_plain_numbers_of_two_streams():
    """The last query and the last key of a document have one position; a window goes by these."""
    mask = Mask.documents([0, 5, 17], cu_seqlens_k=[0, 9, 12])
    assert mask.positions.tolist() == [*range(4, 9), *range(12)]
    assert mask.key_positions.tolist() == [*range(9), *range(9, 12)]
    near = np.abs(mask.positions[:, None] - mask.key_positions) <= 2
    assert np.array_equal((mask & (2, 2)).dense(), mask.dense() & near)
    again = Mask.from_dict(mask.to_dict())
    assert again.digest == mask.digest != Mask.documents([0, 5, 17]).digest
    assert np.array_equal(again.key_positions, mask.key_positions)
    assert np.flatnonzero(mask.last).tolist() == [4, 16]
    mod = Mask.from_mask_mod(lambda b, h, q, k: k <= q + 2, 5, keys=7)
    assert np.array_equal(mod.dense(), Mask.causal(5, keys=7).dense())
