"""Corpora of short documents, which jobs pack into their rows."""

import numpy as np
import torch

EOD = 254  # NullTokenizer's, with --vocab-size 255


def write(prefix, documents=600, longest=60, seed=3, skewed=False, lengths=(), end=EOD):
    """A data set of random documents of 1 to `longest` tokens, each with its end-of-document token,
    or `end` in its place; returns its prefix.

    With `skewed`, every eighth document is three times as long; `lengths` are those of all.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for index in range(len(lengths) or documents):
        length = int(random.integers(1, longest + 1)) * (3 if skewed and index % 8 == 0 else 1)
        length = lengths[index] - 1 if lengths else length
        start, step = random.integers(0, EOD, 2)
        text = (start + step * np.arange(length)) % EOD
        builder.add_document(torch.from_numpy(np.append(text, end)), [length + 1])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def data(prefix):
    """Megatron's flags for the data set."""
    words = "--tokenizer-type NullTokenizer --vocab-size 255 --split 90,5,5 --data-path"
    return [*words.split(), prefix]
