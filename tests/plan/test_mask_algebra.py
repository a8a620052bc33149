"""Masks in which a query sees several intervals of keys: as pictures, against their definitions,
and what is rejected.
"""

import functools
import operator
import pickle
import re
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_ring.plan import OPEN, Layout, Mask, Plan, Tiles, union
from cp_ring.plan.tiles import paint
from tests.plan.strategies import disjoint_pieces, masks
from tests.rings import said


def picture(mask):
    """A line for each query: `x` for a key that it sees, `.` for one that it does not see."""
    return ["".join(".x"[int(seen)] for seen in line) for line in mask.dense()]


# What each constructor means


def test_a_response_sees_its_prompt_and_itself():
    mask = Mask.shared_prefix([(5, [3, 4]), (2, [6])])
    assert picture(mask) == [
        "x...................",  # a prompt of 5 tokens
        "xx..................",
        "xxx.................",
        "xxxx................",
        "xxxxx...............",
        "xxxxxx..............",  # its response of 3
        "xxxxxxx.............",
        "xxxxxxxx............",
        "xxxxx...x...........",  # its response of 4, which does not see that of 3
        "xxxxx...xx..........",
        "xxxxx...xxx.........",
        "xxxxx...xxxx........",
        "............x.......",  # a prompt of 2
        "............xx......",
        "............xxx.....",  # its response of 6
        "............xxxx....",
        "............xxxxx...",
        "............xxxxxx..",
        "............xxxxxxx.",
        "............xxxxxxxx",
    ]
    assert mask.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7]
    assert np.flatnonzero(mask.last).tolist() == [4, 7, 11, 13, 19]


def test_a_window_is_counted_in_positions():
    assert picture(Mask.shared_prefix([(4, [2, 2])], window=(2, 0))) == [
        "x.......",
        "xx......",
        "xxx.....",
        ".xxx....",
        "..xxx...",  # first response
        "...xxx..",
        "..xx..x.",  # second response: as far into the prompt as the first
        "...x..xx",
    ]


def test_the_tokens_of_an_image_see_one_another():
    assert picture(Mask.images(8, [(2, 4), (5, 7)])) == [
        "x.......",
        "xx......",
        "xxxx....",  # an image of 2 tokens
        "xxxx....",
        "xxxxx...",
        "xxxxxxx.",  # another
        "xxxxxxx.",
        "xxxxxxxx",
    ]
    assert picture(Mask.images(6, [(4, 5), (1, 3)], cu_seqlens=[0, 4, 5])) == [
        "x.....",
        "xxx...",
        "xxx...",
        "xxxx..",
        "....x.",  # a second document, and padding
        "......",
    ]


def test_global_tokens_see_and_are_seen_beyond_the_window():
    assert picture(Mask.with_global(8, [(0, 1), (5, 6)], window=(1, 0))) == [
        "x.......",  # global
        "xx......",
        "xxx.....",
        "x.xx....",
        "x..xx...",
        "xxxxxx..",  # global
        "x....xx.",
        "x....xxx",
    ]
    assert picture(Mask.with_global(6, [(2, 3)], window=(1, 1), causal=False)) == [
        "xxx...",
        "xxx...",
        "xxxxxx",  # global
        "..xxx.",
        "..xxxx",
        "..x.xx",
    ]


def test_a_branch_sees_its_ancestors():
    mask = Mask.tree(parents=[-1, 0, 1, 0, -1], lengths=[2, 2, 1, 2, 1], n=9)
    assert picture(mask) == [
        "x........",  # branch 0, the trunk
        "xx.......",
        "xxx......",  # branch 1 of branch 0
        "xxxx.....",
        "xxxxx....",  # branch 2 of branch 1
        "xx...x...",  # branch 3 of branch 0
        "xx...xx..",
        ".......x.",  # branch 4, another root
        ".........",  # padding
    ]
    assert mask.positions.tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 0]


def test_blocks():
    assert picture(Mask.block_causal(5, 2)) == ["xx...", "xx...", "xxxx.", "xxxx.", "xxxxx"]
    mask = Mask.block_diffusion(8, 2)
    assert picture(mask) == [
        "xx......",  # the clean half
        "xx......",
        "xxxx....",
        "xxxx....",
        "....xx..",  # the noised half: a block sees itself and the clean blocks before it
        "....xx..",
        "xx....xx",
        "xx....xx",
    ]
    assert mask.positions.tolist() == [0, 1, 2, 3] * 2


def test_documents_and_batch_rows_begin_at_position_0():
    assert Mask.documents([0, 2, 5], n=6).positions.tolist() == [0, 1, 0, 1, 2, 0]
    assert Mask.causal(3).positions.tolist() == [0, 1, 2]
    assert Mask.batch([Mask.causal(2), Mask.shared_prefix([(1, [1, 1])])]).positions.tolist() == [
        0,
        1,
        0,
        1,
        1,
    ]
    assert Mask.documents([0, 2, 5], n=6).last.tolist() == [False, True, False, False, True, True]


# The algebra


@settings(max_examples=150)
@given(data=st.data(), n=st.integers(1, 24))
def test_a_union_has_the_pairs_of_all(data, n):
    several = data.draw(st.lists(masks(n), min_size=1, max_size=4))
    made = Mask.union(*several)
    assert np.array_equal(made.dense(), np.any([mask.dense() for mask in several], axis=0))
    assert paint(made.pieces, n, n).max(initial=0) <= 1
    assert functools.reduce(operator.or_, several).digest == made.digest


@settings(max_examples=150)
@given(data=st.data(), n=st.integers(1, 24), window=st.tuples(*[st.integers(-1, 9)] * 2))
def test_a_window_hides_what_is_further_away(data, n, window):
    mask = data.draw(masks(n))
    away = mask.positions[None, :] - mask.positions[:, None]
    near = ((window[0] < 0) | (away >= -window[0])) & ((window[1] < 0) | (away <= window[1]))
    made = mask & window
    assert np.array_equal(made.dense(), mask.dense() & near)
    assert paint(made.pieces, n, n).max(initial=0) <= 1


@settings(max_examples=150)
@given(data=st.data(), n=st.integers(1, 24))
def test_overlaps_are_found_and_named(data, n):
    """One more piece is rejected exactly where it shares a pair with another, and the message names
    both.
    """
    pieces = data.draw(disjoint_pieces(n))
    q0, q1, k0, k1 = (
        edge for _ in range(2) for edge in sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))
    )
    more = (
        q0,
        q1,
        k0,
        k1,
        data.draw(st.sampled_from([-OPEN, -3, 0])),
        data.draw(st.sampled_from([OPEN, 3, 0])),
    )
    Mask.from_pieces(n, pieces)
    painted = paint([*pieces, more], n, n)
    if painted.max() < 2:
        assert np.array_equal(Mask.from_pieces(n, [*pieces, more]).dense(), painted > 0)
        return
    every = [*pieces, more]
    named = re.search(r"^pieces (\d+) .* and (\d+) .* overlap", said(Mask.from_pieces, n, every))
    assert paint([every[int(index)] for index in named.groups()], n, n).max() > 1


# Plans of them


def test_the_proof_rejects_pieces_that_overlap_or_lie_outside():
    layout = Layout.zigzag(32, 2)
    for pieces, message in (
        (
            [(0, 32, 0, 32, -OPEN, 0), (20, 24, 3, 6, -OPEN, OPEN)],
            "the mask has pairs twice: its pieces .* overlap",
        ),
        (
            [(0, 40, 0, 32, -OPEN, 0)],
            r"for 32 tokens, but its piece \(0, 40, 0, 32, .*\) lies outside",
        ),
    ):
        assert re.search(message, said(Plan.build(Mask(32, Tiles.of(pieces)), layout).verify))


GROUP = Mask.shared_prefix([(4096, [1024] * 8)])
"""One prompt of 4,096 tokens and 8 responses of 1,024."""


def test_a_shared_prefix_saves_what_the_documentation_says():
    """Work 0.44 and wire 0.15 of 8 separate copies at cp 4, and balanced."""
    alone = Mask.causal(4096 + 1024)
    assert (GROUP.area(), 8 * alone.area()) == (46_143_488, 104_878_080)
    separate = Plan.build(alone, Layout.zigzag(alone.n, 4)).verify()
    shared = Plan.build(GROUP, Layout.balanced(GROUP, 4)).verify()
    assert shared.balance < 1.05
    assert int(shared.keys_in.sum()) == 13_824 and 8 * int(separate.keys_in.sum()) == 92_160
    assert round(GROUP.area() / (8 * alone.area()), 2) == 0.44 and round(13_824 / 92_160, 2) == 0.15


def test_ranks_with_other_positions_have_another_mask():
    """Ranks compare digests: rotary embeddings with other positions would be wrong without a line."""
    prefix = Mask.shared_prefix([(5, [3, 4])])
    plain = Mask.from_pieces(12, prefix.pieces)
    assert prefix.digest == pickle.loads(pickle.dumps(prefix)).digest != plain.digest


@settings(max_examples=60)
@given(data=st.data(), n=st.integers(1, 40))
def test_equal_pieces_have_equal_digests_in_any_order(data, n):
    """Ranks may list a mask's pieces in other orders."""
    mask = data.draw(masks(n))
    order = data.draw(st.permutations(range(len(mask.pieces))))
    assert replace(mask, pieces=mask.pieces[np.array(order, int)], name="x").digest == mask.digest
    allowed = mask.dense()
    place = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    allowed[place] = ~allowed[place]
    assert replace(Mask.from_dense(allowed), segments=mask.segments).digest != mask.digest


def test_a_union_of_many_pieces_costs_what_they_share(monkeypatch):
    """Not an interval for each piece in each strip: these are a thousand, and 46 s."""
    documents, size = 512, 64
    n, made = documents * size, []
    starts = range(0, n, size)
    plain = union._intervals

    def counted(*args):
        made.append(len((found := plain(*args))[0]))
        return found

    monkeypatch.setattr(union, "_intervals", counted)
    seen_by_all = Mask.from_pieces(n, [(0, n, s + 8, s + 24) for s in starts])
    either = Mask.union(Mask.documents([*starts, n]), seen_by_all)
    assert sum(made) < 20 * 2 * documents
    beside = size * (size + 1) // 2 - sum(size - key for key in range(8, 24))
    assert either.area() == documents * (16 * n + beside)
