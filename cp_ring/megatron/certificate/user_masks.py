"""Samples of the masks that users declare for batches."""

from __future__ import annotations

import numpy as np

from cp_ring.plan.mask import Mask

TREE = (-1, 0, 1, 1, 0, -1)
"""The parents of its branches."""


def sample(kind: str, n: int, seed: int) -> Mask:
    """Return a mask of `n` tokens, at least 64, of a kind of `MASK_KINDS`. Each seed gives another
    mask.
    """
    random = np.random.default_rng(seed)
    cuts = [0, *sorted(random.choice(np.arange(1, n), 6, replace=False).tolist())]
    lengths, edges = np.diff(cuts).tolist(), [*cuts[::2], n]
    block = n // 9 + seed % 5
    match kind:
        case "causal" | "full":
            return Mask.causal(n) if kind == "causal" else Mask.full(n)
        case "documents":
            return Mask.documents(edges)
        case "prefix":
            return Mask.prefix(n, np.diff(edges) // 2, edges)
        case "shared-prefix":
            return Mask.shared_prefix([(lengths[0], lengths[1:4]), (lengths[4], lengths[5:])], n)
        case "tree":
            return Mask.tree(TREE, lengths, n)
        case "global":
            return Mask.with_global(n, [(0, 1), (cuts[3], cuts[3] + 1)], (n // 8, 0))
        case "block-causal":
            return Mask.block_causal(n, block)
        case "block-diffusion":
            return Mask.block_diffusion(n, block)
    # images around a quarter and a half of the sequence, where many layouts have an edge
    size = n // 16 + seed % 5
    return Mask.images(n, [(n * i // 4 - size, n * i // 4 + size // 2) for i in (1, 2, 3)])
