"""Updates to run on random partial results, and what they must give."""

import math

import torch

from cp_ring.megatron.wrapping import replaced
from cp_ring.ops.segments import Segments
from cp_ring.plan import updates as planned
from cp_ring.plan.updates import MAX_PARTS, Partial, query_updates
from cp_ring.testing.oracle import error

# Tokens of the total that each partial result has, in its order; the last is in reverse order.
# Tokens 40 and 41 are in none, and the first ones in the first two.
RANGES = [[(0, 37)], [(20, 33), (0, 5)], [(33, 40)], [(3, 20)], [(12, 40)], [(36, 40), (13, 20)]]
TOKENS = 42
SHAPES = [
    (2, 2, 24, torch.float32, 50),
    (1, 2, 40, torch.bfloat16, 0),
    (2, 1, 1, torch.float16, 99),
]
"""Sizes b, h, d, the dtype, and how many tokens come before those of `RANGES`, which the first
partial result has alone: with many of them the result does not wait for the last update.
"""

MOSTS = (1, 2, MAX_PARTS)  # parts of an update


def parts(before):
    moved = [[(start + before, end + before) for start, end in ranges] for ranges in RANGES]
    moved[0][0] = 0, moved[0][0][1]
    return [Partial.of(ranges, reverse=ranges is moved[-1]) for ranges in moved]


def updates(most, before):
    """The updates of the totals, of at most so many parts each, and the parts of each."""
    with replaced((planned, "MAX_PARTS", most)):
        made, found, first = query_updates([parts(before)], TOKENS + before, True), [], 0
    for update in made:
        begin = 12 if most == 4 else 3 if most > 1 else 0
        assert update.kept == slice(before + begin * bool(before), before + 40)
        segments = Segments(*update)
        found.append((segments, slice(first, first + segments.parts)))
        first += segments.parts
    return found


def totals(shape, dtype, before):
    """For updates of some numbers of parts, and results in float32 and `dtype`: the updates, the
    running total in float32 of the tokens that need one, the result where that holds it, and the
    result.
    """
    for most in MOSTS:
        for kind in {torch.float32, dtype}:
            result = torch.full(shape, math.nan, dtype=kind)
            steps = updates(most, before)
            running = torch.full_like(result[steps[0][0].kept], math.nan, dtype=torch.float32)
            yield steps, result if kind == torch.float32 else running, result


def tokens_of(part):
    """The tokens of the total that a partial result has, in the order of the partial result."""
    spans = [torch.arange(start, end) for start, end, _ in part.ranges.T.tolist()]
    return torch.cat([span.flip(0) if part.step < 0 else span for span in spans])


def of_update(segments, running, result):
    """The result as `Totals` gives it to an update: empty while no token is complete."""
    return result if running is result or segments.ends else result.new_empty(0)


def merges_agree_with_float64(merge, exact=True):
    """Any updates give the same bits, close to float64, in both dtypes of the result.

    Without `exact`, nearly the same bits: torch computes exp in vectors, and in another way where a
    vector is not full.
    """
    generator = torch.Generator().manual_seed(0)
    for b, h, e, dtype, before in SHAPES:
        places, size = [tokens_of(part) for part in parts(before)], TOKENS + before
        outs = [
            torch.randn(len(at), b, h, e + 3, generator=generator).to(dtype)[..., :e]
            for at in places
        ]
        lses = [
            5 * torch.randn(len(at), h, b, generator=generator).permute(2, 1, 0) for at in places
        ]
        lses[0][0, 0, before + 36] = -math.inf  # also in others, which count alone
        for out, lse, at in zip(outs, lses, places, strict=True):
            lse[..., at == before + 30], out[at == before + 30] = -math.inf, 0.0  # in none
        total = torch.zeros(b, h, size, dtype=torch.float64)
        truth = torch.zeros(size, b, h, e, dtype=torch.float64)
        for out, lse, at in zip(outs, lses, places, strict=True):
            weight = lse.double().exp()
            total[..., at] += weight
            truth[at] += weight.permute(2, 0, 1)[..., None] * out.double()
        truth_lse, seen = total.log(), total > 0
        truth = (truth / total.permute(2, 0, 1)[..., None]).nan_to_num()
        assert not seen[..., [before + token for token in (30, 40, 41)]].any()
        found = []
        for steps, running, result in totals((size, b, h, e), dtype, before):
            lse = torch.full((b, h, size), math.nan)
            for segments, mine in steps:
                outs_of, end = [x.transpose(0, 1) for x in outs[mine]], result.transpose(0, 1)
                mid = end if running is result else running.transpose(0, 1)
                merge(segments, outs_of, lses[mine], mid, lse, of_update(segments, mid, end))
            assert torch.equal(lse.isneginf(), ~seen)
            assert not result.permute(1, 2, 0, 3)[~seen].any()
            assert error(result, truth) < {2: 5e-3, 4: 1e-6}[result.itemsize]
            assert float((lse[seen] - truth_lse[seen]).abs().max()) < 1e-5
            if result.dtype == dtype:
                found.append(result)
        assert all(
            torch.equal(found[0], x) if exact else torch.allclose(found[0], x) for x in found[1:]
        )


def sums_agree_with_float64(add):
    """Any updates give the same bits, those of float32 sums in the order of the parts."""
    generator = torch.Generator().manual_seed(0)
    for b, h, d, dtype, before in SHAPES:
        places = [tokens_of(part) for part in parts(before)]
        given = [
            torch.randn(b, len(at), h, d, generator=generator).to(dtype).transpose(0, 1)
            for at in places
        ]
        wanted = torch.zeros(TOKENS + before, b, h, d)
        for part, at in zip(given, places, strict=True):
            wanted[at] += part.float()
        fewer = d // 2 + 1  # the size of a second total
        pairs = [(part, part[..., :fewer]) for part in given]
        for steps, running, result in totals(wanted.shape, dtype, before):
            results, runs = (
                [x[..., :size].clone() for size in (d, fewer)] for x in (result, running)
            )
            runs = results if running is result else runs
            for segments, mine in steps:
                ends = [of_update(segments, *each) for each in zip(runs, results, strict=True)]
                add(segments, pairs[mine], runs, ends)
            for found in results:
                truth = wanted[..., : found.shape[-1]]
                # Triton's interpreter cuts bfloat16 off instead of rounding it
                if found.dtype == torch.bfloat16:
                    assert ((found.float() - truth).abs() <= 2**-7 * truth.abs()).all()
                else:
                    assert torch.equal(found, truth.to(found.dtype))
