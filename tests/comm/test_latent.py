"""Latents of multi-latent attention on the wire: outputs, gradients and bytes, against attention in
float64.
"""

import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from cp_ring import LatentKeys, Layout, Mask, Plan, ring_attention
from cp_ring.observe.counters import record
from cp_ring.observe.debug import debugging
from cp_ring.plan.sizes.attention_sizes import AttentionSizes, LatentSizes
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, brute_force
from tests.rings import joined, off, said

N, B, H = 96, 2, 4
SIZES = LatentSizes(latent=24, rope=8, nope=16, value=12)


class LatentCase(NamedTuple):
    q: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor
    weight: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def draw(cls, dtype=torch.float32, seed=0, n=N, batch=B):
        c, r, nope, e = SIZES
        generator = torch.Generator().manual_seed(seed)
        shapes = (
            (batch, n, H, nope + r),
            (batch, n, c),
            (batch, n, r),
            (H * (nope + e), c),
            (batch, n, H, e),
        )
        q, latent, rope, weight, dout = (
            torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes
        )
        return cls(*(x.to(dtype) for x in (q, latent, rope, weight / c**0.5, dout)))


def truth_of(case, mask):
    """Out and gradients of q, latent, rope and weight in float64; attention itself is that of
    `brute_force`.
    """
    q, latent, rope, weight = (x.detach().double().requires_grad_() for x in case[:4])
    both = torch.einsum("bsc,gnc->bsgn", latent, weight.view(H, -1, SIZES.latent))
    k = torch.cat([both[..., : SIZES.nope], rope[:, :, None].expand(-1, -1, H, -1)], -1)
    v = both[..., SIZES.nope :]
    grads = brute_force(Case(q, k, v, case.dout), mask.dense())
    dlatent, drope, dweight = torch.autograd.grad(
        (k, v), (latent, rope, weight), (grads.dk, grads.dv)
    )
    return [grads.out, grads.dq, dlatent, drope, dweight]


def on_rank(group, case, plan, **options):
    """Runs on a rank: out and gradients of its tokens, and its share of the weight's gradient."""
    first = options.get("qkv_format") == "sbhd"
    parts = [
        plan.layout.shard(x, group.rank, 1) for x in (case.q, case.latent, case.rope, case.dout)
    ]
    q, latent, rope, dout = (x.transpose(0, 1) if first else x for x in parts)
    q, latent, rope, weight = (
        x.detach().clone().requires_grad_() for x in (q, latent, rope, case.weight)
    )
    out = ring_attention(
        q,
        LatentKeys(latent, rope, weight, q.shape[2], SIZES.nope),
        group=group,
        plan=plan,
        **options,
    )
    found = [out.detach(), *torch.autograd.grad(out, (q, latent, rope, weight), dout)]
    return [x.transpose(0, 1) for x in found[:4]] + found[4:] if first else found


def attend(case, plan, **options):
    parts = LocalRing(plan.cp).run(on_rank, case, plan, **options)
    return joined(plan.layout, [[*part[:4], part[4].double()] for part in parts])


MASKS = {
    "causal": Mask.causal(N),
    "full": Mask.full(N),
    "documents": Mask.documents([0, 7, 50, 51, N]),
    "window": Mask.causal(N, (20, 0)),
}
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.2e-2}


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_equals_brute_force(mask, cp):
    case, plan = LatentCase.draw(), Plan.build(MASKS[mask], Layout.zigzag(N, cp))
    with debugging():
        results = attend(case, plan)
    assert off(results, truth_of(case, MASKS[mask])) < LIMIT[torch.float32]


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_format": "sbhd"},
        {"num_slots": 3},
        {"wire_dtype": "bfloat16"},
        {"wire": "int8"},
        {"sink": torch.ones(H)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options(options):
    case, plan = LatentCase.draw(), Plan.build(MASKS["causal"], Layout.zigzag(N, 3))
    results = attend(case, plan, **options)
    plain = attend(case, plan, **{**options, "wire": "plain", "wire_dtype": "input"})
    limit = {"wire_dtype": 1e-2, "wire": 1.5e-2}.get(next(iter(options)), LIMIT[torch.float32])
    assert off(results, plain) < limit


@pytest.mark.parametrize("mask", MASKS)
def test_messages_have_the_bytes_of_the_plan(mask):
    case, plan = LatentCase.draw(), Plan.build(MASKS[mask], Layout.zigzag(N, 4))
    dim = SIZES.nope + SIZES.rope
    sizes = AttentionSizes(H, H, dim, SIZES.value, "fp32", batch=B, wire="latent", latent=SIZES)
    report, (keys, gradients) = plan.verify(), sizes.on_wire()
    with record() as moved:
        attend(case, plan)
    assert moved.bytes_by_kind["keys"] == 2 * report.keys_out.sum() * keys
    assert moved.bytes_by_kind["gradients"] == report.grads_out.sum() * gradients
    plain = replace(sizes, wire="plain").on_wire()[0]
    assert plain == keys * H * (dim + SIZES.value) / (SIZES.latent + SIZES.rope)


def test_bad_input_is_one_line():
    q, latent, rope, weight, _ = LatentCase.draw()
    keys = LatentKeys(latent, rope, weight, H, SIZES.nope)
    for make, says in (
        (lambda: LatentKeys(latent, rope[:, 1:], weight, H, SIZES.nope), "the same tokens"),
        (lambda: LatentKeys(latent, rope, weight[1:], H, SIZES.nope), "weight must be"),
        (lambda: LatentKeys(latent, rope, weight, H, 28), "key_dim=28 leaves no value"),
        (lambda: LatentKeys(latent, rope.double(), weight, H, SIZES.nope), "must share one dtype"),
        (lambda: ring_attention(q[..., :20], keys), "q and k must share a head size"),
    ):
        assert re.search(says, said(make))
    assert "wire='latent' needs LatentKeys" in said(ring_attention, q, q, q, wire="latent")
    plan = Plan.build(MASKS["causal"], Layout.zigzag(N, 2))

    def over_heads(group):
        q, latent, rope = (plan.layout.shard(x, group.rank, 1) for x in LatentCase.draw()[:3])
        options = {"group": group, "causal": True, "heads": 2}
        ring_attention(q, LatentKeys(latent, rope, weight, H, SIZES.nope), **options)  # plain
        ring_attention(q, LatentKeys(latent, rope, weight, H, SIZES.nope), wire="latent", **options)

    assert "wire='latent' does not support heads=2" in said(LocalRing(2).run, over_heads)
