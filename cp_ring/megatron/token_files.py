"""Token files in the format of Megatron's IndexedDataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


class TokenFile:
    """Documents appended to `prefix`.bin; `close` writes the index, `prefix`.idx.

    Tokens are stored in the smallest integer type that holds `vocab_size` of them.
    """

    def __init__(self, prefix: Path, vocab_size: int):
        self._prefix = prefix
        self._builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))

    def add(self, document: Sequence[int]) -> None:
        self._builder.add_document(np.array(document), [len(document)])

    def close(self) -> None:
        self._builder.finalize(f"{self._prefix}.idx")
