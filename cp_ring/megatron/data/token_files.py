"""Writes token files in the format of Megatron's IndexedDataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


class TokenFile:
    """Appends documents to `prefix`.bin; `close` writes the index, `prefix`.idx.

    Tokens are stored in the smallest integer type that can tell `vocab_size` tokens apart.
    """

    def __init__(self, prefix: Path, vocab_size: int):
        self._prefix = prefix
        self._builder = IndexedDatasetBuilder(
            f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size)
        )

    def add(self, document: Sequence[int]) -> None:
        """Appends one document, given as token ids."""
        self._builder.add_document(np.array(document), [len(document)])

    def close(self) -> None:
        """Writes the index; the file cannot be read before."""
        self._builder.finalize(f"{self._prefix}.idx")
