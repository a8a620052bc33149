"""Data that Megatron would read for ever, or find broken hours later, is one line before ranks
start.
"""

import json

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from cp_ring.megatron.data.file_checks import problem_of_conversations, problem_of_tokens


def write(prefix, lengths, vocabulary=100_000):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocabulary))
    for length in lengths:
        builder.add_document(np.arange(length), [length])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("vocabulary", [100, 100_000])
def test_a_whole_file_is_accepted(tmp_path, vocabulary):
    write(tmp_path / "all", [7] * 1000, vocabulary)
    for split in ("969, 30, 1", "100,0,0", "8/1/1", "1", None):
        assert problem_of_tokens(str(tmp_path / "all"), split) == ""


@pytest.mark.parametrize("count", [10, 380])
def test_a_part_without_tokens_is_named(tmp_path, count):
    """Megatron counts the epochs of 0 tokens for ever, and the other ranks wait for it."""
    write(tmp_path / "few", [7] * count)
    problem = problem_of_tokens(str(tmp_path / "few"), "969, 30, 1")
    name = "validation" if count == 10 else "test"
    assert problem.startswith(f"{name} gets no token of its {count} documents: give --split")
    # what the line says to do is accepted
    assert problem_of_tokens(str(tmp_path / "few"), "100,0,0") == ""
    assert problem_of_tokens(str(tmp_path / "few"), "8,1,1") == ""


def test_parts_are_those_of_megatron(tmp_path):
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    from cp_ring.megatron.data.file_checks import SPLITS, _parts

    for split in ("969, 30, 1", "8/1/1", "0,1,3", "98,2"):
        for count in (1, 3, 10, 381, 1000):
            bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
            wanted = [
                (name, round(each[0] * float(count)), round(each[1] * float(count)))
                for name, each in zip(SPLITS, bounds, strict=True)
                if each is not None
            ]
            assert list(_parts(split, count)) == wanted, (split, count)


def test_files_that_are_cut_short_are_named(tmp_path):
    prefix = tmp_path / "cut"
    write(prefix, [7] * 20)
    whole = (tmp_path / "cut.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[:-3])
    assert "cut.bin is cut short: its index names 560 bytes, and it holds 557" in (
        problem_of_tokens(str(prefix), None)
    )
    (tmp_path / "cut.bin").write_bytes(whole)
    index = (tmp_path / "cut.idx").read_bytes()
    (tmp_path / "cut.idx").write_bytes(index[:-9])
    assert "cut.idx is cut short" in problem_of_tokens(str(prefix), None)
    (tmp_path / "cut.idx").write_bytes(b"what")
    assert "cut.idx is no index of a token file" in problem_of_tokens(str(prefix), None)
    write(prefix, [0, 0])
    assert problem_of_tokens(str(prefix), None) == "it holds no token"


def test_a_file_of_conversations_is_looked_at_before_ranks_start(tmp_path):
    good = json.dumps({"messages": [{"role": "user", "content": "a"}]})
    file = tmp_path / "talks.jsonl"
    file.write_text(f"{good}\n\n{good}\n")
    assert problem_of_conversations(str(file)) == ""
    file.write_text(good + '\n{"messages": [{"role": "user", "content": null}]}\n')
    assert problem_of_conversations(str(file)).startswith("line 2 is not a JSON object with")
