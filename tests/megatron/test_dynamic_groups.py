"""Dynamic context parallelism: microbatches of one step on all ranks, on some of them and on one,
against one rank.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.megatron.groups import program
from tests.rings import said

pytestmark = pytest.mark.xdist_group("pool")

VOCAB, LONGEST = 64, 64
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8,
    "rope_type": "rope",
}  # fmt: skip
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
# for each microbatch, how many ranks share it, and the documents of each group of ranks
STEP = (
    (4, ((64,),)),
    (2, ((32, 16), (48,))),
    (1, ((13,), (7, 5), (20,), (9,))),
    (4, ((16, 40),)),
)


def build(cp, kind="", seed=3, groups=None, **more):
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    settings = {"latent": LATENT, "window": {"window_size": (9, 0), **FULL}}.get(kind, {}) | more
    predictions = {"mtp_num_layers": 1} if kind == "predictions" else {}
    torch.manual_seed(seed)
    make = MLATransformerConfig if kind == "latent" else TransformerConfig
    heads = {} if kind == "latent" else {"num_query_groups": 2}
    config = make(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0,
        hidden_dropout=0.0, context_parallel_size=cp, use_cpu_initialization=True,
        masked_softmax_fusion=False, init_method_std=0.2,
        **{"calculate_per_token_loss": True, "normalization": "RMSNorm", **heads, **predictions, **settings},
    )  # fmt: skip
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        multi_latent_attention=kind == "latent", normalization="RMSNorm"
    )
    further = None
    if predictions:
        further = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config, spec, VOCAB, LONGEST, position_embedding_type="rope", mtp_block_spec=further,
        pg_collection=groups,
    )  # fmt: skip


def microbatches(all_of_them, rank=0):
    """Those of a rank of four, or of one rank that has all of them."""
    random, found = torch.Generator().manual_seed(9), []
    for size, groups in STEP:
        for index, lengths in enumerate(groups):
            tokens = torch.randint(VOCAB, (1, sum(lengths) + 1), generator=random)
            batch = {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
                "loss_mask": (tokens[:, 1:] % 5 > 0).float(),
                "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
            }
            if all_of_them:
                found.append(batch)
            elif rank // size == index:
                found.append(batch | {"local_cp_size": torch.tensor([size], dtype=torch.int32)})
    return found


def gradients(group, kind, cp, fault=False, **settings):
    """On a rank: the loss of a step, and the gradients of all parameters."""
    import cp_ring.megatron
    from cp_ring.megatron.adapter import documents

    def first_of_its_group(packed, group):
        return SimpleNamespace(rank=lambda: 0, size=right(packed, group).size)

    right = documents.group_of_microbatch  # of the patches alone; attention has imported its own
    documents.group_of_microbatch = first_of_its_group if fault else right
    try:
        with program(cp, hybrid=cp > 1, packed=True, **settings):
            model, total, count = build(cp, kind), torch.zeros(()), torch.zeros(())
            for batch in microbatches(cp == 1, dist.get_rank()):
                mine = cp_ring.megatron.split_batch(batch)
                losses = model(
                    mine["tokens"], mine["position_ids"], None, labels=mine["labels"],
                    loss_mask=mine["loss_mask"], packed_seq_params=mine["packed_seq_params"],
                )  # fmt: skip
                loss = (losses * mine["loss_mask"]).sum()
                loss.backward()
                total, count = total + loss.detach(), count + mine["loss_mask"].sum()
            found = [total, *(parameter.grad for parameter in model.parameters())]
            if cp > 1:
                for x in (count, *found):
                    dist.all_reduce(x)
            return [x / count for x in found]
    finally:
        documents.group_of_microbatch = right


def difference(found, wanted):
    largest = max(float(x.norm()) for x in wanted)
    return max(float((x - y).norm()) for x, y in zip(found, wanted, strict=True)) / largest


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("window", {"layout": "balanced"}),
        pytest.param("window", {}, marks=pytest.mark.ci),
        pytest.param("latent", {"wire": "latent"}, marks=pytest.mark.ci),
        pytest.param("predictions", {}, marks=pytest.mark.ci),
    ],
)
def test_groups_of_every_size_in_one_step_are_one_rank(pool, kind, settings):
    wanted = pool.run(gradients, 4, kind, 1)[0]
    found = pool.run(gradients, 4, kind, 4, **settings)
    assert all(difference(each, wanted) < 1e-5 for each in found)


@pytest.mark.ci
def test_positions_of_another_rank_are_seen(pool):
    wanted = pool.run(gradients, 4, "window", 1)[0]
    assert difference(pool.run(gradients, 4, "window", 4, fault=True)[0], wanted) > 1e-3


def lines(group):
    """On a rank: with what each wrong microbatch or model ends."""
    import cp_ring.megatron
    from cp_ring.megatron import settings as in_force
    from cp_ring.megatron.adapter.documents import ALONE

    def run(batch, thd=True, patched=True, **more):
        mine = cp_ring.megatron.split_batch(batch)
        packed = mine["packed_seq_params"]
        if not thd:
            packed.qkv_format, packed.max_seqlen_q = "sbhd", 48
        model = build(4, **more)
        for layer in model.decoder.layers if not patched else ():
            layer.self_attention.core_attention.positions_by_group = False
        model(mine["tokens"], mine["position_ids"], None, packed_seq_params=packed)

    with program(4, hybrid=True, packed=True):
        batch = {name: x for name, x in microbatches(True)[1].items() if name != "labels"}
        on_two = batch | {"local_cp_size": 2}
        found = [
            said(run, on_two, patched=False),
            said(run, on_two, calculate_per_token_loss=False),
            said(run, on_two, num_moe_experts=2, moe_aux_loss_coeff=0.1),
            said(run, on_two, is_hybrid_model=True),
            said(run, batch | {"local_cp_size": 3}),
            said(run, {"tokens": batch["tokens"], "local_cp_size": 2}),
            said(run, on_two, thd=False),
        ]
        in_force.configure(replace(in_force.current(), layout="balanced"))
        packed = SimpleNamespace(local_cp_size=2, cp_group=None)
        return [
            *found,
            said(run, batch),
            said(cp_ring.megatron.adapter.documents.group_of_microbatch, packed, ALONE),
        ]


def test_what_cannot_run_on_a_group_of_its_own_ends_in_one_line(pool):
    wanted = (
        "call cp_ring.megatron.enable before the model is built",
        "needs --calculate-per-token-loss",
        "does not support --moe-aux-loss-coeff 0.1: give 0",
        "which models with recurrent or sparse layers do not support",
        "local_cp_size 3: there is no such group: give a power of two",
        "local_cp_size needs packed documents: give their offsets as cu_seqlens",
        "give packed documents (thd), or leave it out",
        "documents that are split one by one are split by zigzag, not balanced: give document_mask",
        "packed_seq_params.local_cp_size is 2, but its cp_group, by default",
    )
    for found in pool.run(lines, 4):
        assert all(part in line for part, line in zip(wanted, found, strict=True)), found
