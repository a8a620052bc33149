"""Updates: every partial result is added once, what is first is stored, what is last is complete."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_ring import Layout, Mask, Plan
from cp_ring.plan.updates import ABSENT, MAX_PARTS, Partial, Update, gradient_updates, query_updates
from tests.plan.strategies import plans
from tests.plan.test_properties import QUIET


def replay(
    updates: tuple[Update, ...], sources: list[np.ndarray], num_tokens: int
) -> list[list[int]]:
    """For each token of a total, the numbers that its partial results hold for it, in the order in
    which they were added.
    """
    running: list[list[int] | None] = [None] * num_tokens
    result: list[list[int] | None] = [None] * num_tokens
    waiting = iter(sources)
    for update in updates:
        parts = [next(waiting) for _ in range(update.parts)]
        assert update.parts <= MAX_PARTS
        for start, end, first, last, *positions in update.segments.T.tolist():
            for token in range(start, end):
                assert result[token] is None, "complete tokens are not touched again"
                assert (running[token] is None) == bool(first)
                places = [
                    p + token - start if p >= 0 else -2 - (p + token - start)
                    for p in positions
                    if p != ABSENT
                ]
                held = [part for part, p in zip(parts, positions, strict=True) if p != ABSENT]
                total = [
                    *(running[token] or []),
                    *(int(part[place]) for part, place in zip(held, places, strict=True)),
                ]
                (result if last else running)[token] = total
    assert next(waiting, None) is None and None not in result, (
        "all parts are read, all tokens are complete"
    )
    return result  # type: ignore[return-value]


@settings(max_examples=300, **QUIET)
@given(data=st.data())
def test_every_part_is_added_once_and_in_order(data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 40))
    parts, sources = [], []
    expected: list[list[int]] = [[] for _ in range(n)]
    for number in range(data.draw(st.integers(0, 11)) if n else 0):
        cuts = sorted(data.draw(st.sets(st.integers(0, n), min_size=2, max_size=6)))
        ranges = data.draw(st.permutations(list(zip(cuts[::2], cuts[1::2], strict=False))))
        reverse = data.draw(st.booleans())
        tokens = [np.arange(*r)[:: -1 if reverse else 1] for r in ranges]
        parts.append(Partial.of(ranges, reverse=reverse))
        sources.append(1000 * number + np.concatenate(tokens))
        for token in np.concatenate(tokens).tolist():
            expected[token].append(1000 * number + token)
    most = data.draw(st.integers(1, MAX_PARTS))
    updates = query_updates([parts], n, most)
    assert replay(updates, sources, n) == expected
    assert all(update.whole <= (len(parts) == 1) for update in updates)


@settings(max_examples=200, **QUIET)
@given(plan=plans(min_cp=2))
def test_gradients_of_random_plans(plan: Plan) -> None:
    """What a kernel call or a message holds for a key is added once, to the total of the hop. What
    arrives does not wait.
    """
    for rank in range(plan.cp):
        mine = plan.rank_plan(rank)
        hops = mine.backward
        parts = [
            [
                _keys(tile, shift)
                for tile, shift in zip(hop.tiles, hop.grad_shift.tolist(), strict=True)
            ]
            for hop in hops
        ]
        updates = gradient_updates(hops, parts, mine.num_tokens)
        assert updates.keys() == {0} | {hop.index for hop in hops}
        for index, of_hop in updates.items():
            events: list[Partial] = []
            before: list[Partial] = []
            for hop, calls in zip(hops, parts, strict=True):
                events += calls if hop.index == index else []
                events += before
                first = np.cumsum([0, *(t.tokens for t in hop.grad_receives)]).tolist()
                both = zip(hop.grad_receives, first, strict=False)
                before = [
                    Partial.of(t.ranges, at, arrived=True) for t, at in both if t.buffer == index
                ]
            events += before
            assert [x for update in of_hop for x in update.arrived] == [
                part.arrived for part in events
            ]
            size = (
                mine.num_tokens
                if index == 0
                else max(hop.num_grads for hop in hops if hop.index == index)
            )
            expected: list[list[int]] = [[] for _ in range(size)]
            for number, part in enumerate(events):
                for start, end, at in zip(
                    part.start.tolist(), part.end.tolist(), part.position.tolist(), strict=True
                ):
                    for token in range(start, end):
                        expected[token].append(1000 * number + at + token - start)
            sources = [1000 * number + np.arange(1000) for number in range(len(events))]
            assert replay(of_hop, sources, size) == expected
            # The buffer of what arrived is used again: nothing else comes into its update after it.
            for update in of_hop:
                assert list(update.arrived) == sorted(update.arrived)
                assert not (update.whole and update.arrived[0])


def _keys(tile: object, shift: int) -> Partial:
    return Partial.of([(tile.k0 + shift, tile.k1 + shift)])  # type: ignore[attr-defined]


def test_by_hand() -> None:
    """Five calls of a causal rank: four in one update, which completes the queries that the fifth
    does not touch.
    """
    spans = [(0, 8), (0, 8), (0, 8), (0, 8), (4, 8)]
    first, second = query_updates([[Partial.of([span]) for span in spans]], 8)
    assert first.segments.T.tolist() == [[0, 4, 1, 1, 0, 0, 0, 0], [4, 8, 1, 0, 4, 4, 4, 4]]
    assert second.segments.T.tolist() == [[4, 8, 0, 1, 0]]
    assert (first.read, first.stored) == ((32, 0), (0, 4, 4)) and (second.read, second.stored) == (
        (4, 0),
        (4, 0, 4),
    )
    (only,) = query_updates([[Partial.of([(0, 8)])]], 8)
    assert only.whole and not first.whole
    (fill,) = query_updates([], 8)
    assert fill.segments.T.tolist() == [[0, 8, 1, 1]] and fill.parts == 0
    assert query_updates([], 0) == ()
    whole = Partial.of([(0, 8)])
    by_hop = query_updates([[whole, whole], [whole], [whole], []], 8)
    # the rank's own keys wait for hop 1, hop 1 not for hop 2
    assert [update.parts for update in by_hop] == [3, 1]


@pytest.mark.parametrize("rank", range(8))
def test_what_leaves_is_as_the_kernel_made_it(rank: int) -> None:
    """With one source a hop, a tile covers the gradient buffer of its hop."""
    plan = Plan.build(Mask.causal(1024), Layout.zigzag(1024, 8), schedule="ring").rank_plan(rank)
    parts = [
        [_keys(tile, shift) for tile, shift in zip(hop.tiles, hop.grad_shift.tolist(), strict=True)]
        for hop in plan.backward
    ]
    updates = gradient_updates(plan.backward, parts, plan.num_tokens)
    assert all(update.whole for index, of_hop in updates.items() for update in of_hop if index)
