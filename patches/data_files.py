"""Reads the files of data sets as what they are: numbers.

Megatron keeps an index of each data set in a cache, by default in the folder of the data, and reads
it with `numpy.load(allow_pickle=True)`: plainly until 0.18, and since 0.19 through a list of names
that still lets forged arrays crash the process. It trusts what a token file's index (.idx) says
about the token file (.bin).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.rejection import first_line
from cp_ring.megatron.wrapping import Function, around
from cp_ring.patches.patch import Patch, Replacement

_BUILDERS = {
    "gpt_dataset.GPTDataset": "_build_document_sample_shuffle_indices",
    "blended_dataset.BlendedDataset": "_build_indices",
    "masked_dataset.MaskedWordPieceDataset": "_build_sample_index",
}


class BadCache(ConfigError):
    """A file of the cache does not hold an index."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(
            f"{path}: it is no index of a data set ({problem}): remove it, and Megatron makes it "
            "anew"
        )
        self.path, self.problem = path, problem


def load_index(path: Any, *_: Any, mmap_mode: Any = None, **__: Any) -> Any:
    """As `numpy.load` of an array of integers, which is all that Megatron caches; raises `BadCache`
    for anything else.

    `FileNotFoundError` is as it was.
    """
    import numpy as np

    try:
        array = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except FileNotFoundError:
        raise
    except Exception as error:  # a forged header raises nearly anything
        raise BadCache(str(path), f"{type(error).__name__}: {first_line(error)}"[:200]) from None
    name = os.path.basename(str(path))
    wanted = 2 if name.endswith("-sample_index.npy") else 1
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != wanted:
        content = (
            f"{array.dtype} {array.shape}"
            if isinstance(array, np.ndarray)
            else type(array).__name__
        )
        raise BadCache(
            str(path),
            f"it holds {content:.100}, not integers in {wanted} dimension{'s' * (wanted > 1)}",
        )
    return array


class _NumPyOfCaches:
    """Stands for the module `numpy` in the modules of data sets: only `load` differs."""

    load = staticmethod(load_index)

    def __getattr__(self, name: str) -> Any:
        import numpy as np

        return getattr(np, name)


@around
def _rebuilding(build: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of Megatron that reads a cache or, where there is none, makes it on rank 0: here
    also where it is a bad one.
    """
    from cp_ring.megatron.rejection import note, rejecting

    with rejecting():
        for _ in range(3):  # an index has three files
            try:
                return build(self, *args, **kwargs)
            except BadCache as error:
                if not _is_first() or getattr(self.config, "fast_cache_load", False):
                    raise
                os.unlink(error.path)
                note(
                    f"warning: {error.path} is no index of a data set ({error.problem}): it is "
                    "made anew"
                )
        return build(self, *args, **kwargs)


def index_problem(lengths: Any, pointers: Any, documents: Any, itemsize: int, size: int) -> str:
    """Why an index cannot be that of a token file of `size` bytes, or "".

    lengths: int32 [n], tokens of each sequence, of `itemsize` bytes. pointers: int64 [n], their
    first bytes. documents: int64
    [d], the first sequence of each document, and n.
    """
    if len(documents) and (
        documents[0] < 0 or documents[-1] > len(lengths) or (documents[1:] < documents[:-1]).any()
    ):
        return "its documents are not in the order of its sequences"
    if not len(lengths):
        return ""
    if lengths.min() < 0 or pointers.min() < 0:
        return "a sequence has a negative length or place"
    last = int(pointers.max())  # first alone: near the end of int64 the sum would be negative
    last = last if last > size else int((pointers + lengths.astype("int64") * itemsize).max())
    return f"it needs {last} bytes, and the token file has {size}" if last > size else ""


@around
def _checked(initialize: Function, self: Any, path_prefix: str, *args: Any, **kwargs: Any) -> None:
    """Megatron's `IndexedDataset.initialize`, which compares an index on disk with its token file,
    on rank 0 alone.
    """
    from cp_ring.megatron.rejection import rejecting

    with rejecting():
        self.index = self.bin_reader = None  # `__del__` expects both
        try:
            initialize(self, path_prefix, *args, **kwargs)
        except (ValueError, KeyError, OverflowError, AttributeError, struct.error) as error:
            raise ConfigError(f"{path_prefix}.idx: not an index of a token file: {error}") from None
        except AssertionError as error:
            if "cannot read" not in str(error):  # that a file is missing is clear as it is
                raise
            raise ConfigError(f"{path_prefix}.idx: not an index of a token file: {error}") from None
        problem = _problem_of(self, path_prefix) if _is_first() else ""
        if problem:
            raise ConfigError(f"{path_prefix}.idx: not the index of {path_prefix}.bin: {problem}")


def _is_first() -> bool:
    """Whether this is rank 0, and no worker of its data loader."""
    import torch

    alone = not torch.distributed.is_initialized()
    return torch.utils.data.get_worker_info() is None and (
        alone or torch.distributed.get_rank() == 0
    )


def _problem_of(dataset: Any, path_prefix: str) -> str:
    index, tokens = dataset.index, f"{path_prefix}.bin"
    if not os.path.isfile(tokens):  # in an object store
        return ""
    kind = getattr(index.dtype, "__name__", str(index.dtype))
    if "int" not in kind and not dataset.multimodal:
        return f"its tokens are {kind}, not integers"
    arrays = index.sequence_lengths, index.sequence_pointers, index.document_indices
    return index_problem(*arrays, index.dtype_size, os.path.getsize(tokens))


def _replacements() -> Iterator[Replacement]:
    import importlib

    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for place, name in _BUILDERS.items():
        module_name, _, class_name = place.partition(".")
        module = importlib.import_module(f"megatron.core.datasets.{module_name}")
        if hasattr(module, "safe_numpy_load"):  # since 0.19
            yield module, "safe_numpy_load", load_index
        else:
            yield module, "numpy", _NumPyOfCaches()
        owner = getattr(module, class_name)
        yield owner, name, _rebuilding(getattr(owner, name))
    yield IndexedDataset, "initialize", _checked(IndexedDataset.initialize)


PATCH = Patch(
    what="reads the cached indices of data sets as integers, without pickle, and compares token "
    "files with their indices",
    why="whoever can write to the folder of the data could run code in the job, or make it read "
    "what is not there",
    when="!program",
    replacements=_replacements,
)
