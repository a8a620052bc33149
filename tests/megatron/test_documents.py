"""Packed documents: boundaries, masks, padding."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cp_ring.errors import ConfigError
from cp_ring.megatron import settings
from cp_ring.megatron.adapter import documents as documents_module
from cp_ring.megatron.adapter.config import Split
from cp_ring.megatron.options import Options
from tests.megatron.groups import Group
from tests.peers import tables
from tests.rings import refused


@pytest.fixture(scope="module", autouse=True)
def megatron():
    """Imports Megatron when the first test runs: at collection it would cost every worker seconds."""
    global PackedSeqParams, DocumentParams, Documents, boundaries, documents_of
    from megatron.core.packed_seq_params import PackedSeqParams

    from cp_ring.megatron.adapter.documents import (
        DocumentParams,
        Documents,
        boundaries,
        documents_of,
    )


REAL, PADDED = np.array([0, 5, 6, 6, 15]), np.array([0, 8, 16, 16, 32])
BOTH = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def packed(**changes):
    offsets, padded = torch.from_numpy(REAL).int(), torch.from_numpy(PADDED).int()
    values = {
        "qkv_format": "thd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded, "max_seqlen_q": 16, "max_seqlen_kv": 16,
    }  # fmt: skip
    return PackedSeqParams(**(values | changes))


def test_a_document_ends_with_its_end_of_document_token_as_in_megatron():
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    rows = torch.tensor([[5, 9, 3, 9, 9, 2, 2, 2], [9, 1, 1, 1, 1, 1, 1, 9]])
    made = [_get_ltor_masks_and_position_ids(row, 9, True, True, True, True) for row in rows]
    edges = boundaries(torch.stack([positions for _, _, positions in made]))
    assert edges.tolist() == [0, 2, 4, 5, 8, 9, 16]
    mask = Documents.in_rows(edges, 2, 2).mask().dense()
    for row, (hidden, _, _) in enumerate(made):
        assert (mask[8 * row : 8 * row + 8, 8 * row : 8 * row + 8] == ~hidden[0].numpy()).all()
    assert not mask[8:, :8].any() and not mask[:8, 8:].any()


@pytest.mark.parametrize(
    "flags, rejected, noted",
    [
        ("--data-path {yes}", False, False),
        ("--data-path {no}", True, False),
        ("--data-path 3 {no} 1 {no}", True, False),
        ("--data-path 3 {no} 1 {yes}", False, True),
        ("--train-data-path {yes} --valid-data-path {no}", False, True),
        ("--train-data-path {no}", True, False),
        (
            "--train-data-path {yes} --valid-data-path {yes} {no} --multiple-validation-sets",
            False,
            True,
        ),
        ("--mock-data", False, False),
        ("--data-path {no} --dataloader-inter-document-masking", False, False),
    ],
)
def test_data_without_ends_of_documents_are_named(
    tmp_path, monkeypatch, capsys, one_rank, flags, rejected, noted
):
    from cp_ring.megatron import gpt
    from cp_ring.megatron.flags import argument_parser, resolve
    from tests.megatron.documents import write
    from tests.megatron.launch import MODEL, TRAIN

    paths = {"yes": write(tmp_path / "yes", 60), "no": write(tmp_path / "no", 60, end=1)}
    given = [*MODEL, *TRAIN, "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"]
    given += [*flags.format(**paths).split(), "--cp-ring", "--cp-ring-document-mask"]
    given += ["--split", "90,5,5"] if "train" not in flags else []
    args = argument_parser.build_parser().parse_args(given)
    options = Options.from_args(args)
    resolve.check_attention(args, options)
    settings.configure(options)
    args.data_cache_path, args.rank = str(tmp_path), 0
    monkeypatch.setattr(gpt, "get_args", lambda: args)
    monkeypatch.setattr(gpt.parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    with pytest.raises(ConfigError, match="no end-of-doc") if rejected else nullcontext() as error:
        gpt.datasets_provider([8, 8, 8])
    text = str(error.value) if rejected else capsys.readouterr().out
    assert (f"(254) ends the documents of {paths['no']}: " in text) == (rejected or noted)


def test_position_ids_that_do_not_begin_anew_are_rejected():
    assert "do not begin at 0" in refused(ConfigError, boundaries, torch.tensor([[3, 4, 0, 1]]))


def test_padding_sees_nothing_and_is_seen_by_nobody():
    split = Documents.in_thd(packed(), 16, 2)
    ends = [*(PADDED[:-1] + np.diff(REAL))]
    for window in ((-1, -1), (2, 0)):
        wanted = tables.packed(PADDED, ends, causal=True, window=window)
        assert (split.mask(window=window).dense() == wanted).all()
    assert split.layout.name == "per_document_zigzag"
    assert Documents.in_thd(packed(), 16, 2, Split()).layout.name == "zigzag"


@pytest.mark.parametrize(
    "changes, tokens, message",
    [
        ({}, 12, "cu_seqlens end at 32, but the 2 ranks .* hold 12 tokens each, 24 together"),
        ({"cu_seqlens_kv": torch.tensor([0, 5, 7, 7, 15])}, 16,
            "and cu_seqlens_kv differ; --cp-ring supports self attention"),
        ({"cu_seqlens_kv": None}, 16, "has only cu_seqlens_q"),
        ({"cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None}, 16, "cu_seqlens end at 15"),
        ({"cu_seqlens_q": PADDED[[0, 2, 3, 4]]}, 16, "differ"),
        ({name: torch.tensor([0, 4, 16, 16, 32]) for name in BOTH}, 16, "do not fit into padded"),
        ({"qkv_format": "bshd"}, 16, "'bshd': --cp-ring supports thd"),
        ({"local_cp_size": 1}, 16, "local_cp_size 1"),
    ],
)  # fmt: skip
def test_packed_sequences_that_contradict_the_tensors_are_rejected_in_one_line(
    changes, tokens, message
):
    changes = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in changes.items()
    }
    with pytest.raises(ConfigError, match=message) as rejection:
        documents_of(packed(**changes), (1, tokens), 2)
    assert "\n" not in str(rejection.value)


def test_boundaries_are_those_that_came_with_the_microbatch():
    first = DocumentParams.carry(Documents.in_rows(np.array([0, 10, 32]), 1, 2))
    second = DocumentParams.carry(Documents.in_rows(np.array([0, 20, 32]), 1, 2))
    found = [documents_of(each, (1, 16), 2).whole.segments[0, 1] for each in (first, second)]
    assert found == [10, 20]
    assert "boundaries are for 32 tokens over 2 ranks, the tensors hold 8" in refused(
        ConfigError, documents_of, first, (1, 8), 2
    )
    described = packed()
    assert documents_of(described, (1, 16), 2) is documents_of(described, (1, 16), 2)


def _fill(params):
    params.cu_seqlens_q.copy_(torch.tensor([0, 5, 6, 6, 9]))
    return params


def _fill_past_the_version_counter(params):
    params.cu_seqlens_q.numpy()[:] = [0, 5, 6, 6, 9]
    return params


def _replace(params):
    params.cu_seqlens_q = params.cu_seqlens_kv = torch.tensor([0, 5, 6, 6, 9])
    return params


@pytest.mark.parametrize(
    "change",
    [_fill, _fill_past_the_version_counter, _replace],
    ids=lambda f: f.__name__,
)
def test_packed_parameters_that_are_reused_describe_what_they_hold_now(change):
    params = packed()
    before = documents_of(params, (1, 16), 2)
    before.rank_plan(0)
    after = documents_of(change(params), (1, 16), 2)
    ends = [each.whole.pieces.q1.tolist() for each in (before, after)]
    assert ends == [[5, 9, 25], [5, 9, 19]]
    assert documents_of(packed(), (1, 16), 2) is before


@pytest.fixture
def middle_stage(monkeypatch):
    """`get_batch` of a middle pipeline stage of one rank; called with a data iterator, the kind of
    positions, and whether there are documents.
    """
    from cp_ring import Options
    from cp_ring.megatron import gpt

    for name in ("context", "tensor_model"):
        group = f"get_{name}_parallel_group"
        monkeypatch.setattr(gpt.parallel_state, group, lambda: documents_module.ALONE)
    monkeypatch.setattr(gpt, "is_first_or_last_pipeline_stage", lambda vp_stage: False)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, **_: tensor)
    arguments = SimpleNamespace(mtp_num_layers=None)
    monkeypatch.setattr(gpt, "get_args", lambda: arguments)

    def get_batch(data_iterator, positions, documents=False):
        settings.configure(Options.make(enabled=True, document_mask=documents))
        arguments.position_embedding_type = positions
        return gpt.get_batch(data_iterator, None)

    return get_batch


def test_a_stage_without_the_microbatch_says_so(middle_stage):
    for documents, positions, flag in (
        (True, "rope", "--cp-ring-document-mask"),
        (False, "mrope", "--position-embedding-type mrope"),
    ):
        line = refused(ConfigError, middle_stage, None, positions, documents)
        assert f"{flag}: this pipeline stage has no data set" in line


def test_a_middle_stage_reads_only_positions_with_sections(middle_stage):
    ids = torch.arange(24).view(1, 3, 8)
    sample = {"tokens": ids[:, 0], "position_ids": ids}
    batch = middle_stage(iter([sample]), "mrope")
    assert torch.equal(batch.pop("position_ids"), ids.transpose(0, 1))
    assert set(batch.values()) == {None} == set(middle_stage(None, "rope").values())


@pytest.mark.parametrize("layout, longest", [("balanced", 16), ("zigzag", 64)])
def test_rotary_positions_begin_at_0_in_each_document(layout, longest):
    """Megatron makes the embeddings of the longest document, not those of the whole batch row, but
    for a split of which it takes a part itself.
    """
    settings.configure(Options(document_mask=True, layout=layout))
    edges = np.array([0, 5, 18, 20, 36, 52, 64, 73, 88, 100, 112, 128])
    documents = Documents.in_rows(edges, 2, 2, Split(layout))
    for rank in range(2):
        stream = documents.layout.positions(rank)
        start = edges[np.searchsorted(edges, stream, "right") - 1]
        wanted = torch.from_numpy(stream - start).view(2, -1).T
        assert torch.equal(documents.positions(rank), wanted) and wanted.max() < documents.longest
    assert documents.longest == 16
    assert DocumentParams.carry(documents).max_seqlen_q == longest


class Waits(TorchDispatchMode):
    """Operations for which the host would wait for a device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "_to_copy", "copy_", "nonzero"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_layers_of_a_microbatch_share_its_rotary_positions(monkeypatch):
    """The first one reads the offsets; the others wait for nothing."""
    from cp_ring.megatron.adapter import rotary

    group = Group(1, 2)
    cu_seqlens = torch.tensor([0, 6, 8, 32], dtype=torch.int32)
    inputs, freqs = torch.randn(16, 2, 4), torch.arange(32.0).view(32, 1, 1, 1)

    def turn(x, picked):
        seen.append(picked.view(-1))
        return x

    monkeypatch.setattr(rotary.rope_utils, "_apply_rotary_pos_emb_bshd", turn)
    turned = partial(rotary.turn_documents, None, cp_group=group)
    seen, waits = [], Waits()
    for layer in range(3):
        with waits if layer else nullcontext():
            turned(inputs, cu_seqlens, freqs)
    places = torch.cat([torch.arange(8, 16), torch.arange(16, 24)]).float()
    assert all(torch.equal(each, places) for each in seen)  # embeddings of the whole sequence
    turned(inputs, cu_seqlens, freqs[:24])
    assert torch.equal(seen[-1], places - 8)  # of positions in documents
    assert [name for name in waits.found if name != "_to_copy"] == []
