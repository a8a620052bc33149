"""Files of data sets are read as numbers: no cache runs code, and an index has to be that of its
token file.
"""

import io
import os
import pickle
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cp_ring import patches
from cp_ring.patches.data_files import BadCache, index_problem, load_index


class Evil:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.fixture
def patch():
    patches.get("data_files").apply()
    yield
    patches.get("data_files").revert()


@pytest.fixture
def tokens(tmp_path):
    """A token file of 20 documents with 30 tokens each."""
    from cp_ring.megatron.data.token_files import TokenFile

    file = TokenFile(tmp_path / "tokens", 100)
    for number in range(20):
        file.add([number] * 30)
    file.close()
    return tmp_path / "tokens"


def samples(tokens):
    """The samples of a data set of Megatron over the token file, with a cache beside it."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    tokenizer = SimpleNamespace(vocab_size=100, eod=0, pad=-1, unique_identifiers={"class": "own"})
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=16, blend=([str(tokens)], None), split="100,0,0", tokenizer=tokenizer,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, path_to_cache=str(tokens.parent /
        "cache"),
    )  # fmt: skip
    dataset = BlendedMegatronDatasetBuilder(
        GPTDataset, [20, None, None], lambda: True, config
    ).build()[0]
    return [dataset[number]["tokens"].tolist() for number in range(20)]


def forged(header):
    """A file of numpy.save with this header and 64 bytes of data."""
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64)


def saved(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


FORGED = {
    "objects": lambda mark: saved(np.array([Evil(mark)], dtype=object)),
    "a pickle": lambda mark: pickle.dumps(Evil(mark)),
    "floats": lambda mark: saved(np.zeros(3)),
    "too many dimensions": lambda mark: saved(np.zeros((3, 2, 1), np.int32)),
    "records": lambda mark: saved(np.zeros(3, "i4,i4")),
    "an archive of arrays": lambda mark: archive(np.arange(3)),
    "more than there is": lambda mark: forged(
    "{'descr': '<i4', 'fortran_order': False, 'shape': (1099511627776,)}"),
    "a negative size": lambda mark: forged(
    "{'descr': '<i4', 'fortran_order': False, 'shape': (-4,)}"),
    "addresses": lambda mark: forged("{'descr': '|O', 'fortran_order': False, 'shape': (4,)}"),
    "a header that is code": lambda mark: forged(f"__import__('os').mkdir({str(mark)!r})"[:118]),
    "nothing": lambda mark: b"",
}  # fmt: skip


def archive(array):
    file = io.BytesIO()
    np.savez(file, array)
    return file.getvalue()


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("mmap_mode", ["r", None])
def test_a_cache_that_holds_no_integers_is_not_loaded(tmp_path, name, mmap_mode):
    path, mark = tmp_path / "a-document_index.npy", tmp_path / "m"
    path.write_bytes(FORGED[name](mark))
    with pytest.raises(BadCache) as stop:
        load_index(str(path), allow_pickle=True, mmap_mode=mmap_mode)
    assert (
        str(path) in str(stop.value)
        and len(str(stop.value).splitlines()) == 1
        and not mark.exists()
    )


@pytest.mark.parametrize("file", ["document", "sample", "shuffle"])
def test_a_forged_cache_is_made_anew(patch, tokens, capsys, file):
    before, mark = samples(tokens), tokens.parent / "mark"
    (path,) = (tokens.parent / "cache").glob(f"*-{file}_index.npy")
    good = path.read_bytes()
    path.write_bytes(FORGED["objects"](mark))
    capsys.readouterr()
    assert samples(tokens) == before and not mark.exists() and path.read_bytes() == good
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("cp_ring: ")
    ]
    assert f"warning: {path} is no index of a data set" in line and "it is made anew" in line
    assert samples(tokens) == before  # read from the cache


def test_every_reader_of_a_cache_is_replaced(patch):
    from megatron.core.datasets import blended_dataset, gpt_dataset, masked_dataset

    for module in (blended_dataset, gpt_dataset, masked_dataset):
        reader = getattr(module, "safe_numpy_load", None) or module.numpy.load
        assert reader is load_index
        assert module.numpy.int32 is np.int32


HEADER = 9 + 8 + 1 + 8 + 8  # magic, version, code of the data type, sequences, documents


def set_bytes(offset, data):
    def change(tokens):
        path = Path(f"{tokens}.idx")
        content = bytearray(path.read_bytes())
        content[offset : offset + len(data)] = data
        path.write_bytes(content)

    return change


DAMAGES = {
    "other magic": set_bytes(0, b"X"),
    "other version": set_bytes(9, struct.pack("<Q", 2)),
    "unknown data type": set_bytes(17, b"\xff"),
    "floats": set_bytes(17, b"\x06"),
    "larger tokens": set_bytes(17, b"\x05"),
    "more sequences": set_bytes(18, struct.pack("<Q", 1 << 62)),
    "all the sequences there can be": set_bytes(18, struct.pack("<Q", (1 << 64) - 1)),
    "more documents": set_bytes(26, struct.pack("<Q", 1 << 40)),
    "negative length": set_bytes(HEADER, struct.pack("<i", -1)),
    "long sequence": set_bytes(HEADER + 19 * 4, struct.pack("<i", 31)),
    "negative place": set_bytes(HEADER + 80, struct.pack("<q", -8)),
    "place at the end of int64": set_bytes(HEADER + 80, struct.pack("<q", (1 << 63) - 8)),
    "document beyond the end": set_bytes(HEADER + 80 + 160 + 20 * 8, struct.pack("<q", 21)),
    "documents in another order": set_bytes(HEADER + 80 + 160 + 8, struct.pack("<q", 9)),
    "short index": lambda tokens: os.truncate(f"{tokens}.idx", HEADER + 10),
    "no header": lambda tokens: os.truncate(f"{tokens}.idx", 12),
    "empty index": lambda tokens: os.truncate(f"{tokens}.idx", 0),
    "short token file": lambda tokens: os.truncate(f"{tokens}.bin", 100),
}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", DAMAGES)
def test_an_index_that_is_not_that_of_its_token_file_ends_the_job_in_one_line(
    patch, tokens, capsys, name, mmap
):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    assert len(IndexedDataset(str(tokens), mmap=mmap)) == 20
    DAMAGES[name](tokens)
    with pytest.raises(SystemExit) as stop:
        IndexedDataset(str(tokens), mmap=mmap)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith(f"cp_ring: error: {tokens}.idx: not ")


def test_a_place_at_the_end_of_int64_does_not_overflow():
    lengths, documents = np.array([4], np.int32), np.array([0, 1])
    assert "it needs" in index_problem(lengths, np.array([(1 << 63) - 1]), documents, 4, 16)
    assert index_problem(lengths, np.array([0]), documents, 4, 16) == ""
