"""Ranks that hold different batches stop with one line before any of them takes its part."""

import datetime

import pytest
import torch
import torch.distributed as dist

import cp_ring
from cp_ring import Layout
from cp_ring.comm import same_batch
from cp_ring.comm.agreement import FIRST
from cp_ring.comm.same_batch import BatchComparison, contents, difference
from cp_ring.cuts import check_cut
from cp_ring.observe.debug import debugging
from tests.rank_pool import LIMIT_S
from tests.rings import rank_of, said

N, CP = 64, 2
LINE = "ranks of the group hold different batches: {} of rank 0 and of rank 1 differ. Each takes"


def rows(seed):
    tokens = torch.randint(99, (1, N), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "position_ids": torch.arange(N)[None]}


def with_shard(batch, group):
    cp_ring.shard(batch, group=group)


def with_split_batch(batch, group):
    from cp_ring.megatron import split_batch

    split_batch(batch, group)


def with_documents(batch, group):
    with_split_batch(batch | {"cu_seqlens": torch.tensor([0, 24, N])}, group)


def with_a_script_of_megatron(batch, group):
    from megatron.core.utils import get_batch_on_this_cp_rank

    from cp_ring.patches.equal_rows import split_equal_rows

    split_equal_rows(get_batch_on_this_cp_rank, batch | {"cu_seqlens": None}, cp_group=group)


def with_transformers(batch, group):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from cp_ring.integrations.transformers import shard_batch

    batch = dict(batch)
    shard_batch({"input_ids": batch.pop("tokens"), **batch}, group)


WAYS = {way.__name__[5:]: way for way in (
    with_shard, with_split_batch, with_documents, with_a_script_of_megatron, with_transformers
)}  # fmt: skip


def split(group, way, equal):
    """What a split of rows says on this rank, "" for nothing. A loader that deals rows by the rank
    in the whole job gives each rank other ones. Every batch is compared: ranks of the pool have
    split others before.
    """
    with debugging():
        return said(WAYS[way], rows(0 if equal else rank_of(group)), group)


def split_before(group):
    """As many batches as a group compares one by one: of later ones it compares one in 16."""
    for _ in range(FIRST + 1):
        with_shard(rows(0), group)


@pytest.mark.parametrize("way", WAYS)
def test_other_rows_on_each_rank_are_one_line_on_all(pool, way):
    pool.run(split_before, CP)
    assert pool.run(split, CP, way, True) == ["", ""]
    first, second = pool.run(split, CP, way, False)
    assert first == second and "\n" not in first
    token = "input_ids" if way == "transformers" else "tokens"
    assert first.startswith(LINE.format(f"{token} of rank 0 and of rank 1 differ; labels")), first
    assert "position_ids" not in first
    assert pool.run(split, CP, way, True) == ["", ""]


def test_the_line_names_all_ranks_that_differ():
    batches = [
        {"tokens": torch.full((1, 4), rank // 2), "same": torch.arange(3)} for rank in range(4)
    ]
    found = difference({rank: contents(batch) for rank, batch in enumerate(batches)})
    assert "batches: tokens of ranks 0, 1 and of ranks 2, 3 differ. Each" in found
    batches[3]["tokens"] = torch.zeros(1, 6, dtype=torch.int64)
    batches[2] = {"same": torch.arange(3)}
    found = difference({rank: contents(batch) for rank, batch in enumerate(batches)})
    assert "tokens of ranks 0, 1 ([1, 4]) and of rank 2 (absent) and of rank 3 ([1, 6])" in found


def test_the_first_microbatches_are_compared_and_then_one_in_sixteen(monkeypatch):
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=LIMIT_S))
    looked = []
    monkeypatch.setattr(
        same_batch, "contents", lambda tensors: looked.append(1) or contents(tensors)
    )

    def one(rank, every):
        comparison, found = BatchComparison(store, rank, 1), []
        for number in range(1, 4 * FIRST + 1):
            before = len(looked)
            comparison.check({"tokens": torch.arange(4)}, every)
            found += [number] * (len(looked) - before)
        return found

    later = [number for number in range(FIRST + 1, 4 * FIRST + 1) if number % 16 == 0]
    assert same_batch.EVERY == 16
    assert one(0, same_batch.EVERY) == [*range(1, FIRST + 1), *later]
    assert one(0, 0) == []


def split_of_a_blend(group):
    """A blend's batch, split by a script: what has no token dimension beside what has one. Layers
    of another layout warn.
    """
    from megatron.core.utils import get_batch_on_this_cp_rank

    from cp_ring.patches.equal_rows import split_equal_rows

    none = dict.fromkeys(("labels", "cu_seqlens", "attention_mask"))
    batch = {name: x.repeat(2, 3) for name, x in rows(0).items()} | none
    batch |= {"dataset_id": torch.tensor([0, 1]), "weights": torch.ones(2, 3)}
    mine = split_equal_rows(get_batch_on_this_cp_rank, batch, cp_group=group)
    with pytest.warns(match="were cut by Layout.zigzag.* but layer 1 has Layout.contiguous"):
        check_cut(group, Layout.contiguous(3 * N, CP), "layer 1")
    return mine, batch


def test_entries_without_a_token_dimension_are_not_split(pool):
    for rank, (mine, whole) in enumerate(pool.run(split_of_a_blend, CP)):
        assert torch.equal(mine["dataset_id"], whole["dataset_id"]) and mine["labels"] is None
        assert torch.equal(mine["weights"], whole["weights"])
        chunks = whole["tokens"].chunk(2 * CP, 1)
        assert torch.equal(mine["tokens"], torch.cat([chunks[rank], chunks[-1 - rank]], 1))
