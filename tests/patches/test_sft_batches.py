"""The packed batches of --sft in scripts of Megatron before 0.18, which their own functions cannot
split or send.

`python -m tests.certificate.checkouts` runs such scripts; without the patch their certificates do
not pass.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cp_ring.megatron import compat
from cp_ring.megatron.flags.rule import problem
from cp_ring.megatron.flags.rules import SCRIPT
from cp_ring.options import Options
from cp_ring.patches import sft_batches
from cp_ring.patches.install import job_of

CONFIG = Options.make(enabled=True)


def packed():
    """A microbatch as the data set of Megatron's scripts gives it: two conversations, of 8 and 16
    tokens.
    """
    tokens = torch.arange(24)[None]
    return {
        "tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(1, 24), "position_ids": tokens,
        "cu_seqlens": torch.tensor([[0, 8, 24]], dtype=torch.int32), "max_seqlen": torch.tensor([16], dtype=torch.int32),
    }  # fmt: skip


@pytest.fixture
def version(monkeypatch):
    def be(number):
        monkeypatch.setattr(compat, "megatron_version", lambda: number)

    return be


@pytest.mark.parametrize(
    ("number", "needed"), [("0.16.1", True), ("0.17.1", True), ("0.18.2", False), ("0.19.0", False)]
)
def test_scripts_split_packed_batches_themselves_since_0_18(version, number, needed):
    version(number)
    assert (sft_batches.PATCH.unneeded() == "") == needed


@pytest.mark.parametrize("rank", [0, 1])
def test_each_conversation_is_split_and_the_order_of_entries_stays(monkeypatch, rank):
    group = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
    monkeypatch.setattr(compat, "group_of", lambda collection, name: group)
    given = packed() | {"attention_mask": None}
    offsets, longest = given.pop("cu_seqlens"), given.pop("max_seqlen")
    mine, params = sft_batches.split_by_document(given, offsets, None, longest)
    # scripts take the values one by one
    assert list(mine) == list(given) and mine["attention_mask"] is None
    wanted = (
        [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23],
        [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19],
    )[rank]
    assert mine["tokens"].tolist() == [wanted] and mine["labels"].tolist() == [
        [token + 1 for token in wanted]
    ]
    assert (
        params.qkv_format == "thd"
        and params.cu_seqlens_q.tolist() == params.cu_seqlens_q_padded.tolist() == [0, 8, 24]
    )


@pytest.mark.parametrize("tensor_rank", [0, 1])
def test_the_lengths_reach_every_tensor_parallel_rank(monkeypatch, tensor_rank):
    from megatron import training
    from megatron.core import mpu, tensor_parallel

    sent = packed()

    def broadcast(names, data, dtype):
        assert all(sent[name].dtype == dtype for name in names)
        assert set(data) == (set(sent) if tensor_rank == 0 else set())  # rank 0 alone reads
        return {name: sent[name] for name in names}

    monkeypatch.setattr(tensor_parallel, "broadcast_data", broadcast)
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", lambda: tensor_rank)
    monkeypatch.setattr(training, "get_args", lambda: SimpleNamespace(sft=True))
    found = sft_batches.read_on_every_rank(None, iter([packed()]) if tensor_rank == 0 else None)
    assert list(found)[:5] == ["tokens", "labels", "loss_mask", "attention_mask", "position_ids"]
    assert found["cu_seqlens"].tolist() == [[0, 8, 24]] and found["max_seqlen"].tolist() == [16]
    monkeypatch.setattr(training, "get_args", lambda: SimpleNamespace(sft=False))
    assert sft_batches.read_on_every_rank(lambda iterator: {"of": "Megatron"}, None) == {
        "of": "Megatron"
    }


@pytest.mark.parametrize(
    ("number", "words", "rejected"),
    [
        ("0.16.1", "--pipeline-model-parallel-size 4", True),
        (
            "0.16.1",
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            True,
        ),
        ("0.16.1", "--pipeline-model-parallel-size 2", False),
        ("0.17.1", "--pipeline-model-parallel-size 4", False),
    ],
)
def test_middle_stages_without_documents_are_rejected(version, number, words, rejected):
    version(number)
    line = problem(job_of(["pretrain_gpt.py", "--sft", *words.split()], CONFIG), SCRIPT)
    assert (
        "give middle stages no documents, so that tokens would see other documents" in line
    ) is rejected
