"""Corpora of short documents, which jobs pack into their rows."""

from pathlib import Path

import numpy as np
import torch

EOD = 254  # NullTokenizer's, with --vocab-size 255


def write(
    prefix: Path, documents: int = 600, longest: int = 60, seed: int = 3, skewed: bool = False
) -> str:
    """A data set of random documents of 1 to `longest` tokens, each with its end-of-document token;
    returns its prefix.

    With `skewed`, every eighth document is three times as long.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for index in range(documents):
        length = int(random.integers(1, longest + 1)) * (3 if skewed and index % 8 == 0 else 1)
        start, step = random.integers(0, EOD, 2)
        text = (start + step * np.arange(length)) % EOD
        builder.add_document(torch.from_numpy(np.append(text, EOD)), [length + 1])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def data(prefix: str) -> list[str]:
    """Megatron's flags for the data set."""
    return [
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "255",
        "--data-path",
        prefix,
        "--split",
        "90,5,5",
    ]
