"""attention-gym's masks and score modifications (attn_gym/masks and attn_gym/mods at 757b03d, the
names of its newer ones from its documentation), as functions of query and key of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np

from cp_ring import Mask
from tests.peers.attend import Case

N, SIDE, VIDEO = 64, 8, (4, 4, 4)
Rule = Callable[[Any, Any], Any]


def _morton(i: Any) -> tuple[Any, Any]:
    """Two coordinates below 8 whose bits alternate."""
    x = (i & 1) + ((i >> 2 & 1) << 1) + ((i >> 4 & 1) << 2)
    return x, (i >> 1 & 1) + ((i >> 3 & 1) << 1) + ((i >> 5 & 1) << 2)


def _tiled(i: Any, tile: int = 4) -> tuple[Any, Any]:
    block, inside = i // tile**2, i % tile**2
    per_row = SIDE // tile
    return block // per_row * tile + inside // tile, block % per_row * tile + inside % tile


def _near(place: Callable[[Any], tuple[Any, Any]], kernel: int) -> Rule:
    """Neighborhoods whose center is kept away from the edges."""
    half = kernel // 2

    def center(x: Any) -> Any:
        return x.clip(half, SIDE - 1 - half)

    def rule(q: Any, k: Any) -> Any:
        (qx, qy), (kx, ky) = place(q), place(k)
        return (abs(center(qx) - kx) <= half) & (abs(center(qy) - ky) <= half)

    return rule


def _tiles(side: tuple[int, ...], tile: int, reach: int) -> Rule:
    """Sliding tiles: queries see the tiles within `reach` of their own, in each direction."""

    def places(i: Any) -> list[Any]:
        found = []
        for size in reversed(side):
            found.append(i % size // tile)
            i = i // size
        return found

    def rule(q: Any, k: Any) -> Any:
        near = [abs(a - b) <= reach for a, b in zip(places(q), places(k), strict=True)]
        return near[0] & near[1] & (near[2] if len(near) > 2 else near[0])

    return rule


def _documents(inner: Rule, edges: tuple[int, ...] = (0, 10, 13, 40, 64)) -> Rule:
    def number(i: Any) -> Any:
        return sum((i >= edge) * 1 for edge in edges[1:-1])

    def start(i: Any) -> Any:
        return sum((i >= b) * (b - a) for a, b in pairwise(edges[:-1]))

    return lambda q, k: (number(q) == number(k)) & inner(q - start(q), k - start(k))


def causal(q: Any, k: Any) -> Any:
    return q >= k


def window(size: int) -> Rule:
    return lambda q, k: (q >= k) & (q - k <= size)


def prefix(size: int) -> Rule:
    return lambda q, k: (q >= k) | (k < size)


_CHOSEN = np.random.default_rng(0).random((8, 8)) < 0.4
MASKS: dict[str, Rule] = {
    "causal": causal,
    "sliding window 16": window(16),
    "sliding window 1": window(1),
    "prefix 20": prefix(20),
    "prefix 64": prefix(64),
    "documents, causal": _documents(causal),
    "documents, window": _documents(window(5)),
    "documents, prefix": _documents(prefix(4)),
    "packed causal documents": _documents(causal, (0, 1, 2, 33, 64)),
    "natten 3": _near(lambda i: (i // SIDE, i % SIDE), 3),
    "natten 5": _near(lambda i: (i // SIDE, i % SIDE), 5),
    "tiled natten 3": _near(_tiled, 3),
    "tiled natten 5": _near(_tiled, 5),
    "morton natten 3": _near(_morton, 3),
    "morton natten 5": _near(_morton, 5),
    "sliding tiles 2d": _tiles((8, 8), 2, 1),
    "sliding tiles 3d": _tiles(VIDEO, 2, 0),
    "dilated window": lambda q, k: (q >= k) & (q - k <= 24) & ((q - k) % 3 == 0),
    "dilated window 2": lambda q, k: (q >= k) & (q - k <= 12) & ((q - k) % 2 == 0),
    "spatial heads": lambda q, k: (k < 4) | (abs(q // 16 - k // 16) <= 1),
    "temporal heads": lambda q, k: (k < 4) | (abs(q % 16 - k % 16) <= 1),
    "first tokens and window": lambda q, k: (q >= k) & ((k < 3) | (q - k <= 9)),
    "global tokens and window": lambda q, k: (q < 4) | (k < 4) | (abs(q - k) <= 6),
    "shared prefix": lambda q, k: (q >= k) & ((k < 16) | (q // 16 == k // 16)),
    "batches": lambda q, k: (q // 16 == k // 16) & (q % 16 >= k % 16),
    "block diffusion": lambda q, k: (
        ((q >= 32) & (k >= 32) & (q // 8 == k // 8))
        | ((k < 32) & (q >= 32) & ((q - 32) // 8 > k // 8))
        | ((q < 32) & (k < 32) & (q // 8 >= k // 8))
    ),
    "tree of drafts": lambda q, k: (q >= k) & ((k < 32) | ((q - k) % 4 == 0) | (q == k)),
    "drafts in training": lambda q, k: (k <= q // 4 * 4) | (q == k),
    "causal blocks": lambda q, k: q // 8 >= k // 8,
    "pages": lambda q, k: (k // 8 * 5 % 8) * 8 + k % 8 <= q,
    "anti-causal": lambda q, k: q <= k,
}


def _case(name: str, rule: Rule, cp: int, keys: int = N, **more: Any) -> Case:
    rows, columns = np.arange(N)[:, None], np.arange(keys)
    allowed = np.broadcast_to(np.asarray(rule(rows, columns), bool), (N, keys))
    mask = {"mask": lambda: Mask.from_mask_mod(lambda b, h, q, k: rule(q, k), N)}
    given = {"heads": (4, 2), "sizes": (16, 16), **more}
    call = mask | dict(given.pop("call", {}))
    return Case(name, cp, (N, keys), allowed=allowed[None, None].copy(), call=call, **given)


def attention_gym() -> Iterator[Case]:
    """Masks; images that text sees and latents, with other numbers of queries than of keys; masks by
    head; and score modifications.
    """
    for place, (name, rule) in enumerate(MASKS.items()):
        yield _case(f"{name}, cp 4", rule, 4, split=("balanced",))
        if place % 3 == 0:
            yield _case(f"{name}, cp 2", rule, 2)
    two = ("contiguous", "contiguous")
    for cp in (2, 4):
        yield _case(f"flamingo, cp {cp}", lambda q, k: k // 8 == q // 16, cp, 32, split=two)
        yield _case(f"perceiver, cp {cp}", lambda q, k: (q >= 0) & (k >= 0), cp, 128, split=two)
    for cp in (2, 4):
        rules = (MASKS["spatial heads"], MASKS["temporal heads"])
        rows, columns = np.arange(N)[:, None], np.arange(N)
        each = [np.asarray(rule(rows, columns), bool) for rule in rules]
        groups = [(2, mask) for mask in each]
        yield Case(
            f"spatial and temporal heads, cp {cp}", cp, (N, N), (4, 2), (16, 16),
            np.stack(each).repeat(2, 0)[None],
            {"mask": lambda groups=groups: [(h, Mask.from_dense(mask)) for h, mask in groups]},
            rejected="mask is a list, not a Mask",
        )  # fmt: skip
    for (name, call), cp in product(
        {
            "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
            "softcap": {"softcap": 30.0},
            "approximate softcap": {"softcap": 20.0},
        }.items(),
        (2, 4),
    ):
        yield _case(
            f"{name}, cp {cp}", causal, cp, call=call, rejected="unexpected keyword argument"
        )
    for shape in ((1, 4, N, N), (1, 1, N, N), (2, 4, N, N), (1, 4, 1, N)):
        yield _case(
            f"bias {shape}", causal, 2, call={"bias": shape}, batch=2,
            rejected="unexpected keyword argument 'bias'",
        )  # fmt: skip
    yield _case("latent attention", causal, 2, heads=(4, 1), sizes=(24, 16))
    yield _case("attention sinks", window(9), 2, sinks=(1, 4))
