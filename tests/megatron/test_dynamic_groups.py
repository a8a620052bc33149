"""Dynamic context parallelism: microbatches of one step on all ranks, on some of them and on one,
against one rank.
"""

import copy
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import cp_ring.megatron
from cp_ring import Layout
from cp_ring.megatron import compat
from tests.megatron.groups import program
from tests.parity import faults
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


LENGTHS = 64, 48, 32, 24, 20, 16, 13, 9, 7  # of documents that a schedule deals to groups
ALONE = ((1, tuple((n,) for n in LENGTHS)),)


def microbatches(all_of_them, rank=0, step=STEP):
    """Those of a rank of four, or of one rank that has all of them."""
    random, found = torch.Generator().manual_seed(9), []
    for size, groups in step:
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


@contextmanager
def planted(fault):
    """With `fault`, ranks take the positions of the first one of their group."""
    from cp_ring.megatron.adapter import documents

    def first_of_its_group(packed, group):
        return SimpleNamespace(rank=lambda: 0, size=right(packed, group).size)

    right = documents.group_of_microbatch  # of the patches alone; attention has imported its own
    documents.group_of_microbatch = first_of_its_group if fault else right
    try:
        yield
    finally:
        documents.group_of_microbatch = right


def split(iterator):
    mine = cp_ring.megatron.split_batch(next(iterator))
    names = "tokens", "labels", "loss_mask", "position_ids", "packed_seq_params"
    return [mine[name] for name in names]


def step_into(done, read=split):
    """A program's forward step for a loop of Megatron's; notes loss, tokens and size of the group."""

    def step(iterator, model):
        tokens, labels, mask, ids, packed = read(iterator)
        named = {"labels": labels, "loss_mask": mask, "packed_seq_params": packed}

        def loss(losses):
            total, count = (losses * mask).sum(), mask.sum()
            done.append((total.detach(), count, packed.cp_group and packed.cp_group.size()))
            return total, count.int(), {}

        return model(tokens, ids, None, **named), loss

    return step


def gradients(group, kind, cp, fault=False, **settings):
    """On a rank: the loss of a step, and the gradients of all parameters."""
    done = []
    with planted(fault), program(cp, hybrid=cp > 1, packed=True, **settings):
        model, step = build(cp, kind), step_into(done)
        for batch in microbatches(cp == 1, dist.get_rank()):
            losses, loss = step(iter([batch]), model)
            loss(losses)[0].backward()
        return of_all_ranks(done, model)


def of_all_ranks(done, model):
    """The loss and the gradients of a step per token."""
    count = sum(count for _, count, _ in done)
    found = [sum(total for total, *_ in done), *(x.grad for x in model.parameters())]
    if model.config.context_parallel_size > 1:
        for x in (count, *found):
            dist.all_reduce(x)
    return [x / count for x in found]


def difference(found, wanted):
    largest = max(float(x.norm()) for x in wanted)
    return max(float((x - y).norm()) for x, y in zip(found, wanted, strict=True)) / largest


def scheduled(group, cp, fault=False):
    """On a rank: loss and gradients of one step, by Megatron's own loop over groups of ranks, whose
    schedule gives each document as few as hold it; the sizes of these groups, and what was sent.
    """
    from cp_ring.observe.counters import record

    documents = microbatches(True, step=ALONE)
    done, common = [], {"hybrid": cp > 1, "packed": True, "debug": True}
    with planted(fault), program(cp, **common), record() as counted:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import hybrid_cp_schedule as schedule

        model = build(cp, "window")
        step = step_into(done)
        if cp == 1:
            for batch in documents:
                losses, loss = step(iter([batch]), model)
                loss(losses)[0].backward()
        else:
            ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
            scheduler = schedule.BalancedCPScheduler(16, ranks)
            _, dealt = scheduler.get_groups_and_subsamples([*enumerate(LENGTHS)], model.config)
            schedule.hybrid_context_parallel_forward_backward(
                step, iter([(documents, dealt)]), model, len(documents), None, None, [], model.config, False,
                None, False, nullcontext, torch.zeros((), dtype=torch.int),
                lambda *_: False, None,
            )  # fmt: skip
        return of_all_ranks(done, model), {size for *_, size in done}, counted.bytes_by_kind


@pytest.mark.compat
def test_megatrons_own_schedule_of_groups_is_one_rank(pool):
    if compat.within("<0.19"):
        pytest.skip("this version's loop calls its backward_step with one argument too many")
    wanted = pool.run(scheduled, 4, 1)[0][0]
    for found, sizes, sent in pool.run(scheduled, 4, 4):
        assert difference(found, wanted) < 1e-5
        assert sizes == {1, 2, 4} and {*sent} == {"keys", "gradients"}


def dynamic(group, fault=False):
    """On a rank: the same by the schedule and the batches of Megatron's branch dev, whose microbatches
    hold several documents of a group, in Megatron's usual loop.
    """
    from megatron.core.datasets import data_schedule, data_schedule_utils
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    from cp_ring.megatron.adapter.documents import of_offsets

    def thd_part(offsets, tokens, cp, rank):  # as TransformerEngine's
        return torch.from_numpy(by_document(offsets.numpy(), cp).positions(rank))

    def read(iterator):
        batch = data_schedule.get_batch_on_this_rank_for_sequence_packing(iterator, dynamic_cp=True)
        return [*batch[:3], *batch[4:6]]

    done, documents = [], microbatches(True, step=ALONE)
    data_schedule_utils.get_thd_partitioned_indices = thd_part
    by_document = Layout.per_document_zigzag
    for batch in documents:
        n = batch["tokens"].shape[1]
        for name in ("tokens", "labels", "position_ids", "loss_mask"):
            batch[name] = torch.nn.functional.pad(batch[name], (0, -n % 8))
        batch["original_seq_len"], batch["padded_seq_len"] = torch.tensor([[n], [n + -n % 8]])
        del batch["cu_seqlens"]
    with (
        program(4, hybrid=True, packed=True, debug=True),
        faults.planted("packed documents in order" if fault else ""),
    ):
        of_offsets.cache_clear()
        model = build(4, "window")
        config = copy.copy(model.config)
        config.sequence_packing_scheduler = "default_dynamic_cp"
        config.min_dynamic_context_parallel_size, config.max_seqlen_per_dp_cp_rank = 1, 16
        data, count, *_ = data_schedule.wrap_data_iterator(iter([documents]), config, 1)
        forward_backward_no_pipelining(
            forward_step_func=step_into(done, read), data_iterator=data, model=model, num_microbatches=count,
            seq_length=LONGEST, micro_batch_size=1,
        )  # fmt: skip
        of_offsets.cache_clear()
        return of_all_ranks(done, model), {size for *_, size in done}


@pytest.mark.compat
def test_the_dynamic_schedule_of_megatrons_branch_dev_is_one_rank(pool):
    module = pytest.importorskip("megatron.core.datasets.data_schedule")
    if not hasattr(module, "DefaultDynamicCPScheduler"):
        pytest.skip("it is in Megatron's branch dev")
    wanted = pool.run(scheduled, 4, 1)[0][0]
    for found, sizes in pool.run(dynamic, 4):
        assert difference(found, wanted) < 1e-5
        assert len(sizes) > 1
    assert difference(pool.run(dynamic, 4, fault=True)[0][0], wanted) > 1e-3


def differing(group):
    """On a rank: with what a microbatch on ranks 0 and 1, and one on ranks 2 and 3, end if rank 1 has
    other tokens, and if it has another window.
    """
    with program(4, hybrid=True, packed=True, debug=True):
        first, rank = microbatches(True)[1] | {"local_cp_size": 2}, dist.get_rank()
        other = first | {"tokens": first["tokens"] + (rank == 1)}
        found = [said(cp_ring.megatron.split_batch, other)]
        mine = cp_ring.megatron.split_batch(first)
        model = build(4, "window", window_size=(9 - (rank == 1), 0))
        packed = mine["packed_seq_params"]
        given = mine["tokens"], mine["position_ids"], None
        return [*found, said(model, *given, packed_seq_params=packed)]


@pytest.mark.compat
def test_ranks_compare_batches_and_plans_inside_of_each_group(pool):
    found = pool.run(differing, 4)
    for batch, plan in found[:2]:
        assert "tokens of rank 0 and of rank 1 differ" in batch and "360 pairs> on rank 1" in plan
    assert found[2:] == [["", ""]] * 2


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
    wanted = pool.run(scheduled, 4, 1)[0][0]
    assert difference(pool.run(scheduled, 4, 4, fault=True)[0][0], wanted) > 1e-3


def lines(group):
    """On a rank: with what each wrong microbatch or model ends."""
    from cp_ring.megatron import settings as in_force
    from cp_ring.megatron.adapter import documents

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
            said(documents.group_of_microbatch, packed, documents.ALONE),
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
