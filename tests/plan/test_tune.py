"""The search of `cp-ring tune`, and the time and the memory of a step."""

from dataclasses import replace

import numpy as np
import pytest

from cp_ring.errors import PlanError
from cp_ring.plan.costs.attention_costs import AttentionCosts
from cp_ring.plan.costs.cost import blocked_pairs
from cp_ring.plan.costs.model_sizes import Experts, ModelSizes
from cp_ring.plan.costs.recurrent_costs import RecurrentLayers
from cp_ring.plan.costs.search import Given, Search, possible_sizes, reasons
from cp_ring.plan.costs.simulate import simulate
from cp_ring.plan.costs.step_costs import (
    RECOMPUTE,
    ParallelSizes,
    TrainingSetup,
    step_memory,
    step_seconds,
)
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan
from cp_ring.plan.sizes.attention_sizes import AttentionSizes, LatentSizes
from cp_ring.plan.sizes.device_rates import NAMED, RATES, Rates, named_or_read

MODEL = ModelSizes(
    layers=4,
    hidden=512,
    ffn=1408,
    heads=8,
    kv_heads=2,
    head_dim=64,
    value_dim=64,
    vocabulary=4096,
    windows=(((-1, -1), 4),),
)
LATENT = replace(MODEL, kv_heads=8, head_dim=96, latent=LatentSizes(64, 32, 64, 64))
SLOW = Rates(flops=1e14, inside=2e10, between=2e9)
SETUP = TrainingSetup(
    MODEL, seq_length=8192, global_batch=8, gpus=8, ranks_per_node=4, rates=SLOW, memory=80e9
)


def search(setup=SETUP, given=None, **options):
    masks = [[(Mask.causal(setup.seq_length), setup.model.layers)]]
    return Search(setup, masks, lambda sizes: 1e9 / sizes.tp, given, **options)


def test_the_order_is_that_of_the_exact_times():
    found = search()
    every = list(found.ranked())
    assert len(every) > 30 and [way.step for way in every] == sorted(way.step for way in every)
    bounds = {(sizes, micro): bound for bound, sizes, micro in found._bounds}
    assert all(bounds[way.sizes, way.micro_batch] <= way.step * (1 + 1e-9) for way in every)
    lazy = search()
    first = next(lazy.ranked())
    assert first.step == every[0].step and len(lazy._costs) < len(found._costs), (
        "few plans are made"
    )


def test_a_context_parallel_size_alone():
    assert {way.sizes.cp for way in search().ranked(4)} == {4}
    assert {way.sizes.tp for way in search(given=Given(tp=2)).ranked()} == {2}
    assert {way.micro_batch for way in search(given=Given(micro_batch=2)).ranked()} == {2}


def test_sizes_multiply_to_the_gpus_and_divide_the_model():
    for tp, cp, pp, dp in possible_sizes(SETUP, Given()):
        assert tp * cp * pp * dp == 8 and tp <= 4 and 4 % pp == 0 and 8 % dp == 0
    with_experts = replace(SETUP, model=replace(MODEL, experts=Experts(8, 4, 2, 256, parallel=4)))
    assert {sizes.pp for sizes in possible_sizes(with_experts, Given())} == {1, 2}


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        (
            {"gpus": 7},
            Given(),
            "^--gpus 7: no sizes of tp, cp, pp and dp have this product and divide 8 heads, 8,192 "
            "tokens",
        ),
        ({}, Given(tp=3), "^--tp 3: it does not divide the 8 GPUs of --gpus"),
        ({}, Given(cp=0), "^--cp 0: it does not divide"),
        ({}, Given(tp=8), "^--gpus 8: no sizes of tp, cp, pp and dp with tp 8 "),
    ],
)
def test_what_does_not_factor_is_rejected(changes, given, message):
    with pytest.raises(PlanError, match=message):
        possible_sizes(replace(SETUP, **changes), given)


def test_memory_decides_what_is_recomputed():
    sizes, cost = (
        ParallelSizes(1, 8, 1, 1),
        next(iter(search()._attention(ParallelSizes(1, 8, 1, 1), 1))),
    )
    needs = [sum(step_memory(SETUP, sizes, 1, how, cost, 1e9).values()) for how in RECOMPUTE]
    assert needs == sorted(needs, reverse=True)
    for limit, how in zip((needs[0], needs[1], needs[2]), RECOMPUTE, strict=True):
        assert (
            next(search(replace(SETUP, memory=limit + 1), Given(1, 8, 1, 1)).ranked()).recompute
            == how
        )
    nothing = search(replace(SETUP, memory=1e9))
    assert list(nothing.ranked()) == [] and min(nothing.least_bytes.values()) > 6e9


def test_the_time_of_a_pipeline():
    """Stages of t and a last one of t + l: m microbatches take (m - 1)(t + l) + pp t + l."""
    setup = replace(SETUP, rates=Rates(inside=1e30, between=1e30, memory=1e30))
    attention = (1.0, 3.5, 0.0, 0.0)
    one = step_seconds(setup, ParallelSizes(1, 4, 1, 2), 1, "none", attention)
    two = step_seconds(setup, ParallelSizes(1, 4, 2, 1), 1, "none", attention)
    layers, logits = (one["attention"] + one["other layers"]) / 4, one["output layer"] / 4
    assert one["attention"] == pytest.approx(4 * 3.5) and sum(one.values()) == pytest.approx(
        4 * (layers + logits)
    )
    assert sum(two.values()) == pytest.approx(7 * (layers / 2 + logits) + layers + logits)
    assert two["pipeline waits"] == pytest.approx(layers / 2 + 4 * logits)
    replay = step_seconds(setup, ParallelSizes(1, 4, 1, 2), 1, "replay", attention)
    assert replay["attention"] == pytest.approx(4 * 4.5) and replay[
        "recomputation"
    ] == pytest.approx(one["other layers"] / 3)


def test_uneven_documents_cost_time_between_data_parallel_ranks_alone():
    setup = replace(SETUP, spread=0.5)
    times = [
        step_seconds(setup, sizes, 1, "none", (1, 3, 0, 0))
        for sizes in (ParallelSizes(1, 8, 1, 1), ParallelSizes(1, 1, 1, 8))
    ]
    assert "uneven documents" not in times[0] and times[1]["uneven documents"] > 0.5


def test_parameters_of_known_models():
    llama = ModelSizes(32, 4096, 14336, 32, 8, 128, 128, 128256, (((-1, -1), 32),))
    assert llama.other_parameters + llama.embedding_parameters == pytest.approx(8.03e9, rel=1e-3)
    lite = ModelSizes(27, 2048, 10944, 16, 16, 192, 128, 102400, (((-1, -1), 27),), LatentSizes(512, 64, 128, 128),
                      experts=Experts(64, 26, 6, 1408, 2816, 8))  # fmt: skip
    assert (
        lite.other_parameters + lite.expert_parameters + lite.embedding_parameters
        == pytest.approx(15.7e9, rel=0.01)
    )
    assert lite.token_flops / 2 + lite.embedding_parameters == pytest.approx(2.4e9, rel=0.15), (
        "active, as published"
    )


def test_parameters_of_a_known_hybrid_model():
    """Nemotron-H 8B, as published."""
    letters = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    sizes = {"hidden_size": 4096, "mamba_num_heads": 128}
    model = ModelSizes(
        52, 4096, 21504, 32, 8, 128, 128, 131072, (((-1, -1), 4),), gated=False,
        recurrent=RecurrentLayers.of_model(sizes, letters), networks=letters.count("-"),
    )  # fmt: skip
    assert model.other_parameters + model.embedding_parameters == pytest.approx(8.1e9, rel=1e-3)


def test_a_slow_network_makes_latents_and_heads_worth_it():
    masks = [[(Mask.causal(8192), 1)]]
    slow, fast = (
        next(iter(AttentionCosts(LATENT, masks, 1, 8, 1, 1, Rates(inside=rate, between=rate))))
        for rate in (1e8, 1e15)
    )
    assert slow.wire == "latent" and slow.exposed_both > 0
    assert fast.wire == "plain" and fast.exposed_both < 1e-6
    wires = {cost.wire for cost in AttentionCosts(MODEL, masks, 1, 8, 1, 1, RATES, lossy=True)}
    assert wires == {"plain", "int8", "fp8"}, (
        "codecs that cost accuracy are tried only where that is asked for"
    )


def test_balance_of_documents_chooses_the_layout():
    # the long document's last quarter is on one rank
    offsets = np.array([0, *range(4096, 8193, 64)])
    costs = AttentionCosts(
        MODEL,
        [[(Mask.documents(offsets), 4)]],
        1,
        4,
        1,
        4,
        Rates(flops=1e12),
        ("zigzag", "balanced"),
    )
    assert next(iter(costs)).layout == "balanced"
    assert [cost.both for cost in costs] == sorted(cost.both for cost in costs)


def test_reasons_name_what_costs_time_and_what_does_not_fit():
    ways = list(search().ranked())
    by_cp = (
        {2: 93e9, ways[0].sizes.cp: ways[0], 64: ways[-1]}
        if ways[0].sizes.cp > 2
        else {ways[0].sizes.cp: ways[0], 64: 93e9}
    )
    lines = reasons(ways[0], [ways[3]], by_cp, 80e9)
    assert lines[0].startswith(f"the next, {ways[3].sizes.name}: ") and "% slower" in lines[0]
    assert any("does not fit: at least 93 of 80 GB" in line for line in lines)


def test_a_kernel_that_computes_blocks_takes_longer():
    plan = Plan.build(Mask.causal(1024), Layout.contiguous(1024, 1))
    assert blocked_pairs(plan.ring, 512).tolist() == [[3 * 512**2]]
    assert blocked_pairs(plan.ring, 4096).tolist() == [[4096**2]] and blocked_pairs(
        plan.ring, 4096, padded=False
    ).tolist() == [[1024**2]]
    free = Rates(memory=1e30, call=1e-30)
    report, sizes = plan.verify(), AttentionSizes()
    exact, blocks = (
        simulate(plan, report, sizes, replace(free, block=block)).both for block in (1, 512)
    )
    assert blocks / exact == pytest.approx(3 * 512**2 / (1024 * 1025 / 2))


def test_rates_by_name_or_from_a_file(tmp_path):
    assert named_or_read("h100-nvlink-400g") == RATES and len(NAMED) > 2
    path = tmp_path / "rates.json"
    path.write_text('{"tflops": 2, "link_gb_s": 3, "network_gb_s": null}')
    assert named_or_read(str(path)) == Rates(flops=2e12, inside=3e9)
    with pytest.raises(
        PlanError, match=r"^--rates h101: no such file, nor one of h100-nvlink-400g, "
    ):
        named_or_read("h101")
