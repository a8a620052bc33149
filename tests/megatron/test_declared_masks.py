"""Masks that batches declare: what is read, how it travels, and the examples in which models train
with them.
"""

import importlib
import json
import os
import pickle

import numpy as np
import pytest
import torch

from cp_ring import Layout, Mask, Options
from cp_ring.errors import ConfigError
from cp_ring.megatron import settings
from tests.megatron import worker
from tests.megatron.groups import Group
from tests.megatron.launch import fork
from tests.rings import refused


@pytest.fixture(scope="module", autouse=True)
def megatron():
    """Imports Megatron when the first test runs: at collection it would cost every worker seconds."""
    global DeclaredMask, DocumentParams, batches, documents_of, masks
    from cp_ring.megatron import batches
    from cp_ring.megatron.adapter import microbatch_mask as masks
    from cp_ring.megatron.adapter.documents import DocumentParams, documents_of
    from cp_ring.megatron.data.masks import DeclaredMask


def configure(**values):
    """Puts settings in force."""
    settings.configure(Options(enabled=True, **values))


GROUP = Mask.shared_prefix([(6, [4, 5])], n=16)


def microbatch(**more):
    tokens = torch.arange(32).view(2, 16)
    places = torch.arange(16).expand(2, -1)
    return {
        "tokens": tokens,
        "labels": tokens + 100,
        "position_ids": places,
        "loss_mask": torch.ones(2, 16),
        "step": 3,
    } | more


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
@pytest.mark.parametrize("given", [GROUP, pickle.loads(pickle.dumps(GROUP))])
def test_a_batch_is_split_with_its_mask(layout, given):
    configure(layout=layout, mask_kinds="shared-prefix")
    whole = microbatch(cp_ring_mask=[given, Mask.causal(16)])
    parts = [batches.split_batch(whole, Group(rank, 2)) for rank in range(2)]
    assert all(
        part["tokens"].shape == (2, 8) and part["step"] == 3 and "cp_ring_mask" not in part
        for part in parts
    )
    assert all(torch.equal(part["labels"], part["tokens"] + 100) for part in parts)
    tokens = torch.cat([part["tokens"] for part in parts], 1)
    positions = torch.cat([part["position_ids"] for part in parts], 1)
    order = tokens.argsort(1)
    assert torch.equal(tokens.gather(1, order), whole["tokens"])
    assert positions.gather(1, order)[0].tolist() == GROUP.positions.tolist()
    assert positions.gather(1, order)[1].tolist() == list(range(16))
    for rank, part in enumerate(parts):
        declared = documents_of(part["packed_seq_params"], (1, 16), 2)
        assert np.array_equal(declared.mask().dense(), Mask.batch([GROUP, Mask.causal(16)]).dense())
        assert torch.equal(declared.positions(rank).T, part["position_ids"])
        assert torch.equal(declared.places(rank).T + torch.tensor([[0], [16]]), part["tokens"])


def test_a_data_loader_makes_batches_of_samples_with_masks(applied):
    applied("core_attention")
    samples = [{"tokens": torch.arange(4), "cp_ring_mask": Mask.causal(4)} for _ in range(2)]
    (batch,) = torch.utils.data.DataLoader(samples, batch_size=2)
    assert [mask.n for mask in batch["cp_ring_mask"]] == [4, 4] and batch["tokens"].shape == (2, 4)


@pytest.mark.parametrize(
    "kinds, given, message",
    [
        ("", GROUP,
            "the batch carries cp_ring_mask, but the job declares no kinds of masks: give "
            "--cp-ring-mask-kinds"),
        ("images", GROUP,
            "a mask of the kind shared-prefix, which the certificate has not probed: add "
            "shared-prefix to"),
        ("images", Mask.blockwise([0, 8, 16]),
            "a mask of the kind blockwise, which the certificate has not probed: add any to"),
        ("any", Mask.causal(8), "cp_ring_mask is for 8 tokens, but a batch row has 16"),
        ("any", [GROUP], "cp_ring_mask holds 1 masks for 2 batch rows"),
        ("any", "causal",
            "cp_ring_mask is a str, not a Mask, or a list of them"),
        ("any", Mask.from_pieces(16, [], positions=range(4, 20)),
            "cp_ring_mask has positions up to 19, past the 16 tokens"),
    ],
)  # fmt: skip
def test_what_is_no_mask_of_the_batch_is_rejected_in_one_line(kinds, given, message):
    configure(mask_kinds=kinds)
    with pytest.raises(ConfigError, match=message) as caught:
        batches.split_batch(microbatch(cp_ring_mask=given), Group(0, 2))
    assert "\n" not in str(caught.value)


def test_batches_that_cannot_be_split_are_rejected_in_one_line():
    configure(mask_kinds="any")
    line = refused(ConfigError, batches.split_batch, {"tokens": torch.zeros(1, 15)}, Group(0, 2))
    wanted = "batch rows of 15 tokens cannot be split over 2 context-parallel ranks by layout"
    assert f"{wanted} zigzag: pad" in line
    assert "the tensors of a batch must be [b, n] of one size, not (1, 8), (2, 8)" in refused(
        ConfigError,
        batches.split_batch,
        {"tokens": torch.zeros(1, 8), "labels": torch.zeros(2, 8)},
        Group(0, 2),
    )


STAY = {
    "position_ids": torch.arange(24).repeat(3, 1, 1),  # with sections, which the model splits
    "cu_seqlens_argmin": torch.tensor([[2]]),
    "weight": torch.tensor(0.5),
    "pixels": torch.zeros(3, 8, 8),
    "note": "x",
}
"""Entries without values of each token in dimension 1."""
OF_TOKENS = {
    "top_k": torch.zeros(1, 24, 5),
    "values": torch.zeros(24),
    "pairs": torch.zeros(2, 24),
    "loss_mask": torch.zeros(1, 12),
}


@pytest.mark.parametrize("offsets", [None, [0, 8, 24], [0, 8, 24, -1, -1]])
def test_what_holds_no_values_of_each_token_stays_with_documents_and_without(offsets):
    whole = {"tokens": torch.arange(24)[None], **STAY}
    if offsets is None:
        del whole["cu_seqlens_argmin"]  # tensors [b, n] are of one size
    else:
        whole["cu_seqlens"] = torch.tensor([offsets], dtype=torch.int32)
    part = batches.split_batch(whole, Group(0, 2))
    assert part["tokens"].shape == (1, 12)
    assert all(part[name] is whole[name] for name in STAY if name in whole)
    if offsets is not None:
        assert part["packed_seq_params"].cu_seqlens_q.tolist() == [0, 8, 24]
    for name, x in OF_TOKENS.items():
        if offsets is None and name in ("pairs", "loss_mask"):
            continue  # another line, as all tensors of two dimensions are batch rows
        with pytest.raises(ValueError, match=f"{name} is .*: only tensors .* are split"):
            batches.split_batch(whole | {name: x}, Group(0, 2))


def test_packed_documents_are_split_one_by_one():
    whole = {
        "tokens": torch.arange(24)[None],
        "name": "x",
        "cu_seqlens": torch.tensor([[0, 8, 24]], dtype=torch.int32),
    }
    parts = [
        batches.split_batch(whole | {"max_seqlen": torch.tensor([16])}, Group(rank, 2))
        for rank in range(2)
    ]
    labelled = batches.split_batch(whole | {"labels": whole["tokens"] + 100}, Group(0, 2))
    assert torch.equal(labelled["labels"], parts[0]["tokens"] + 100)
    layout = Layout.per_document_zigzag([0, 8, 24], 2)  # the way back, as docs/documents.md has it
    tokens = [part["tokens"] for part in parts]
    assert torch.equal(layout.unshard(tokens, 1), whole["tokens"])
    packed = parts[0]["packed_seq_params"]
    assert (packed.qkv_format, packed.cu_seqlens_q.tolist(), packed.max_seqlen_q) == (
        "thd",
        [0, 8, 24],
        16,
    )
    assert set(parts[0]) == {"tokens", "name", "packed_seq_params"}
    padded = batches.split_batch(
        whole
        | {"cu_seqlens": torch.tensor([0, 7, 20]), "cu_seqlens_padded": torch.tensor([0, 8, 24])},
        Group(0, 2),
    )
    assert padded["tokens"].tolist() == parts[0]["tokens"].tolist()
    assert padded["packed_seq_params"].cu_seqlens_q.tolist() == [0, 7, 20]
    for wrong, message in [
        ({"tokens": torch.zeros(2, 12)}, r"ends at 24 tokens, so .* be \(1, 24\), not \(2, 12\)"),
        ({"tokens": torch.zeros(1, 23)}, r"ends at 24 tokens, so .* not \(1, 23\)"),
        ({"labels": torch.zeros(1, 23)}, r"labels is \(1, 23\): only tensors \(1, 24\) are split"),
        ({"cu_seqlens": torch.tensor([0, 6, 24])}, "document 0 has 6 tokens, not a multiple of 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            batches.split_batch(whole | wrong, Group(0, 2))
    declared = DocumentParams.carry(DeclaredMask.of_rows([GROUP], 2))
    assert (
        "cp_ring_mask: the boundaries are for 16 tokens over 2 ranks, the tensors hold 4"
        in refused(ValueError, documents_of, declared, (1, 4), 2)
    )


# Training


def run_example(rank, ranks, port, name, folder):
    """Is a rank of an example, and writes what it returns."""
    os.environ |= worker.place(rank, ranks, port)
    torch.distributed.init_process_group("gloo")
    worst = importlib.import_module(f"docs.examples.{name}").main()
    (folder / f"{name}.{rank}.json").write_text(json.dumps(worst))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["rl_shared_prefix", "multimodal_spans"])
def test_examples_train_as_separate_sequences_and_as_stock_megatron(tmp_path, name):
    assert fork(2, (name, tmp_path), target=run_example) == 0
    assert all(
        json.loads((tmp_path / f"{name}.{rank}.json").read_text()) < 1e-5 for rank in range(2)
    )
