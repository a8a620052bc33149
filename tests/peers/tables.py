"""Case tables of libraries of context parallelism. Sequences are shorter, windows and documents
in proportion; what a table does not vary has its default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import torch

from cp_ring import Layout, Mask
from tests.peers.attend import Case

BF16, FP16 = torch.bfloat16, torch.float16


def seen(n: int, keys: int, causal: bool = False, window: Any = (-1, -1)) -> np.ndarray:
    """bool [n, keys], the last query and the last key at one position."""
    distance = np.arange(keys) - np.arange(n)[:, None] - (keys - n)
    left, right = window
    hidden = (distance > 0) & causal
    hidden |= (distance < -left) & (left >= 0)
    return ~(hidden | ((distance > right) & (right >= 0)))


def packed(edges: Any, ends: Any = None, **rule: Any) -> np.ndarray:
    """Of documents from one edge to the next, which end earlier where `ends` says so."""
    allowed = np.zeros((edges[-1], edges[-1]), bool)
    for start, end in zip(edges[:-1], ends or edges[1:], strict=True):
        allowed[start:end, start:end] = seen(end - start, end - start, **rule)
    return allowed


def transformer_engine() -> Iterator[Case]:
    """tests/pytorch/attention/test_attention_with_cp.py at 00d14cd: every model of both tables (not
    only the essential ones), by format and cp_comm_type, but for what any hardware skips; in
    bfloat16 and float16, those with a bias in one. FP8 arithmetic is of its kernels, not of
    masks.
    """
    ways = {
        "p2p": (2, {}),
        "all_gather": (2, {"schedule": "gather"}),
        "a2a": (2, {"heads": 2}),
        "a2a+p2p": (4, {"heads": 2}),
    }
    # causal, heads, key/value heads, sizes, window, bias, sink
    mha, gqa, mla = ((12, 12), (16, 16)), ((12, 2), (16, 16)), ((12, 12), (24, 16))
    wide = (32, 4), (16, 16)
    flash = {
        "cp_1_0": (True, *mha, (-1, -1)), "cp_1_1": (False, *mha, (-1, -1)),
        "cp_1_2": (True, *mha, (8, 0)), "cp_1_3": (False, *mha, (8, 8)),
        "cp_2_0": (True, *wide, (-1, -1)), "cp_2_1": (False, *gqa, (-1, -1)),
        "cp_2_2": (True, (32, 32), (16, 16), (2, 0)), "cp_2_3": (False, *gqa, (8, 8)),
        "cp_3_0": (True, (128, 128), (24, 16), (-1, -1)), "cp_3_1": (False, *mla, (-1, -1)),
        "cp_3_2": (True, *mla, (8, 0)), "cp_3_3": (False, *mla, (8, 8)),
    }  # fmt: skip
    short = (12, 12), (16, 8)
    fused = {
        "cp_1_0": (True, *mha, (-1, -1)), "cp_1_1": (False, *mha, (-1, -1)),
        "cp_1_2": (True, *mha, (-1, -1), "1hss"), "cp_1_3": (False, *mha, (-1, -1), "1hss"),
        "cp_1_4": (False, *mha, (-1, -1), "bhss"), "cp_1_5": (True, *mha, (8, 8)),
        "cp_2_0": (True, *wide, (-1, -1)), "cp_2_1": (True, (32, 32), (16, 16), (2, 0)),
        "cp_2_2": (True, *gqa, (-1, -1), "1hss"), "cp_2_3": (True, *gqa, (-1, -1), "11ss"),
        "cp_2_4": (True, *gqa, (-1, -1), "111s"), "cp_2_5": (False, *gqa, (-1, -1), "1hss"),
        "cp_2_6": (True, *gqa, (8, 8)), "cp_3_0": (True, *short, (-1, -1)),
        "cp_3_1": (True, (128, 128), (24, 16), (-1, -1)),
        "cp_3_2": (True, *short, (-1, -1), "1hss"), "cp_3_3": (False, *short, (-1, -1), "1hss"),
        "cp_3_4": (False, *short, (-1, -1), "b1ss"),
        "cp_4_0": (True, (64, 8), (8, 8), (-1, -1)), "cp_4_1": (True, (64, 8), (8, 8), (-1, -1), 0.0),
        "cp_4_2": (True, (64, 8), (8, 8), (-1, -1), 1.0), "cp_4_3": (True, (64, 64), (8, 8), (2, 0), 1.0),
    }  # fmt: skip
    d256 = {
        "d256": (True, (16, 16), (32, 32), (-1, -1)),
        "d256_swa": (True, (16, 16), (32, 32), (2, 0)),
    }
    for table, models in (("flash", flash), ("fused", fused), ("d256", d256)):
        for model, form, way, pads in product(models, ("bshd", "sbhd", "thd"), ways, (False, True)):
            causal, heads, sizes, window, *more = models[model]
            extra = more[0] if more else None
            windowed = window != (-1, -1)
            if (
                (form == "thd" and (way == "a2a+p2p" or isinstance(extra, str)))
                or (pads and (form != "thd" or table != "flash"))
                or (windowed and "p2p" in way)
                or (isinstance(extra, str) and way != "p2p")
                or (isinstance(extra, float) and way != "a2a")
                or (table == "flash" and sizes[0] != sizes[1] and "p2p" not in way)
                or (table == "d256" and (form == "sbhd" or windowed != (way == "all_gather")))
            ):
                continue
            cp, options = ways[way]
            n, edges = 64, [0, 24, 40, 64]
            call = {**options, "causal": causal, "window_size": window, "qkv_format": form}
            if form == "thd":
                ends = [20, 37, 64] if pads else edges[1:]
                allowed = packed(edges, ends, causal=causal, window=window)
                if pads:
                    call = {**options, "qkv_format": form, "mask": _dense(allowed)}
                else:
                    call |= {"cu_seqlens": edges}
            else:
                allowed = seen(n, n, causal, window)
            batch = 1 if form == "thd" else 2
            bias = isinstance(extra, str)
            call |= {"bias": extra} if bias else {}
            said = {"form": form, "comm": way, "causal": causal, "window": window}
            said |= {"edges": edges, "ends": ends} if form == "thd" else {}
            sinks = (1, heads[0]) if isinstance(extra, float) else ()
            for dtype in (BF16,) if bias else (BF16, FP16):
                yield Case(
                    f"{table} {model} {form} {way} {'pads ' * pads}{dtype}", cp, (n, n), heads,
                    sizes, allowed[None, None], call, batch, dtype=dtype, sinks=sinks,
                    rejected="unexpected keyword argument 'bias'" * bias, table=said,
                )  # fmt: skip


def _dense(allowed: np.ndarray) -> Callable[[], Mask]:
    return lambda: Mask.from_dense(allowed)


def torch_context_parallel() -> Iterator[Case]:
    """test/distributed/tensor/test_attention.py: scaled_dot_product_attention by is_causal,
    compiled, load_balance, rotater and forward_only; flex_attention with causal and document masks
    by length, batch and balancer; and DTensors.
    """
    sizes, heads = (16, 16), (8, 8)
    for causal, compiled, balance, rotater, forward in product(*[(True, False)] * 5):
        if balance and not causal:
            continue
        call = {"causal": causal, "schedule": "ring" if rotater else "gather", "qkv_format": "bhsd"}
        name = f"sdpa {causal=} {compiled=} {balance=} {rotater=} {forward=}"
        split = "zigzag" if balance else "contiguous"
        way = "graph" if compiled else "threads"
        yield Case(
            name, 2, (32, 32), heads, sizes, seen(32, 32, causal)[None, None], call, 2,
            (split,), way=way,
        )  # fmt: skip
    splits = {"none": "contiguous", "head tail": "zigzag", "PTRR": "balanced"}
    for n, balancer in product((128, 64, 32), splits):
        call = {"mask": _causal(n), "qkv_format": "bhsd"}
        allowed = seen(n, n, True)[None, None]
        yield Case(
            f"flex causal {n} {balancer}", 2, (n, n), heads, sizes, allowed, call, 2,
            (splits[balancer],),
        )  # fmt: skip
    rng = np.random.default_rng(10)
    for batch, n, balancer in product((2, 4, 8), (64, 128), (*splits, "per document")):
        each = [
            _random_documents(rng, n, 7, 4 if balancer == "per document" else 1)
            for _ in range(batch)
        ]
        allowed = np.stack([packed(edges, causal=True) for edges in each])[:, None]
        if balancer == "per document":
            layouts = [Layout.per_document_zigzag(edges, 2) for edges in each]
        else:
            made = {"none": Layout.contiguous, "head tail": Layout.zigzag, "PTRR": Layout.zigzag}
            layouts = [made[balancer](n, 2)] * batch
        yield Case(
            f"flex documents {batch} x {n} {balancer}", 2, (n, n), heads, sizes, allowed,
            {"mask": _documents(each), "layout": Layout.batch(layouts)}, batch,
            (tuple(layouts),),
        )  # fmt: skip
    yield Case(
        "DTensor", 2, (32, 32), heads, sizes, seen(32, 32)[None, None], {}, 2, way="DTensor",
        rejected="q is a DTensor: pass the part of this rank",
    )  # fmt: skip


def _causal(n: int) -> Callable[[], Mask]:
    return lambda: Mask.causal(n)


def _documents(each: list[list[int]]) -> Callable[[], Mask]:
    return lambda: Mask.batch([Mask.documents(edges) for edges in each])


def _random_documents(rng: Any, n: int, count: int, unit: int) -> list[int]:
    cuts = np.sort(rng.choice(np.arange(1, n // unit), count - 1, replace=False)) * unit
    return [0, *cuts.tolist(), n]


# kinds of slices: full, causal to the lower right corner, its mirror image, both
MAGI = {
    "full 14k": ([[0, 28]], [[0, 28]], [0], {3, 5, 6, 8}, 1),
    "varlen full 12k": ([[4 * i, 4 * i + 4] for i in range(6)],) * 2 + ([0] * 6, {5, 7}, 0),
    "varlen block causal 15k": (
        [[0, 4], [4, 8], [8, 12], [12, 16], [16, 20], [20, 24], [24, 30]],
        [[0, 4], [0, 8], [0, 12], [0, 16], [16, 20], [16, 24], [24, 30]], [0] * 7, {4, 7, 8}, 4,
    ),
    "varlen block causal 12k, overlapping": (
        [[0, 16], [4, 16], [8, 16], [12, 16], [16, 24], [20, 24]],
        [[0, 4], [4, 8], [8, 12], [12, 16], [16, 20], [20, 24]], [0] * 6, {5, 7}, 0,
    ),
    "both 12k, overlapping": (
        [[0, 20], [20, 40], [40, 60], [60, 80], [80, 100], [100, 120], [10, 39], [98, 117]],
        [[0, 30], [0, 40], [0, 60], [60, 120], [80, 120], [90, 120], [78, 117], [0, 49]],
        [3] * 8, {5, 7}, 8,
    ),
    "several kinds 10k, overlapping": (
        [[0, 8]] * 4 + [[8, 16], [12, 20], [20, 28], [24, 32]] + [[32, 40]] * 4,
        [[0, 8], [8, 16], [16, 24], [24, 40], [0, 8], [8, 16], [0, 8], [8, 16], [0, 8], [8, 16],
            [16, 24], [24, 40]],
        [2, 0, 1, 3, 2, 1, 2, 1, 2, 0, 1, 3], {3, 6, 7, 8}, 0,
    ),
    "full of small pieces 8k": (
        [[i * 4, i * 4 + 4] for i in range(16) for _ in range(8)],
        [[i * 8, i * 8 + 8] for _ in range(16) for i in range(8)], [0] * 128, {3, 5, 6, 7}, 0,
    ),
    "uneven full 10k": ([[0, 101]], [[0, 101]], [0], {5, 6, 7}, 0),
    "uneven varlen 11k": (
        [[0, 20], [20, 40], [40, 60], [60, 80], [80, 95], [95, 111]],
        [[0, 20], [0, 40], [0, 60], [0, 80], [80, 95], [80, 111]], [0, 1, 2, 3, 2, 1], {5, 7}, 0,
    ),
    "full 1k": ([[0, 64]], [[0, 64]], [0], {3, 5, 6, 7}, 1),
    "varlen full 1050": (
        [[12 * i, 12 * i + 12] for i in range(6)] + [[72, 105]],) * 2 + ([0] * 7, {4, 8}, 0),
    "varlen block causal 960": (
        [[12 * i, 12 * i + 12] for i in range(6)] + [[72, 96]],
        [[0, 12], [0, 24], [0, 36], [0, 48], [48, 60], [48, 72], [72, 96]], [0] * 7, {7, 8}, 0,
    ),
    "varlen block causal 840, sinks": (
        [[12 * i, 12 * i + 12] for i in range(6)] + [[72, 84]],
        [[0, 12], [0, 24], [0, 36], [0, 48], [48, 60], [48, 72], [72, 84]], [0] * 7, {4, 8}, 3,
    ),
    "shared question 1k, overlapping": (
        [[0, 64], [8, 16], [16, 32], [32, 64]], [[0, 8], [8, 16], [16, 32], [32, 64]],
        [0] * 4, {3, 5, 6, 7}, 6,
    ),
    "uneven varlen 900": (
        [[15 * i, 15 * i + 15] for i in range(6)],
        [[0, 15], [0, 30], [0, 45], [0, 60], [60, 75], [60, 90]], [1, 0, 2, 3, 2, 1], {7, 8}, 0,
    ),
}  # fmt: skip


def magi_attention() -> Iterator[Case]:
    """tests/test_pipeline.py at 2c64135: slices of queries and keys of four kinds, several sinks, on
    1 to 8 ranks but for those that a case skips, with 8:8 and 8:2 heads; and, once each, what the
    reference has beside: a sink of each query, and other numbers of queries than of keys.
    """
    for (name, (queries, keys, kinds, skipped, sinks)), cp, g in product(
        MAGI.items(), range(1, 9), (8, 2)
    ):
        if cp in skipped:
            continue
        n = max(end for _, end in queries)
        pieces = [
            piece for *each, kind in zip(queries, keys, kinds, strict=True)
            for piece in [_slice(*each, kind)]
        ]  # fmt: skip
        allowed = np.zeros((n, n), bool)
        for q0, q1, k0, k1, lo, hi in pieces:
            distance = np.arange(k0, k1) - np.arange(q0, q1)[:, None]
            allowed[q0:q1, k0:k1] |= (distance >= lo) & (distance <= hi)
        call = {"mask": _pieces(n, pieces), "qkv_format": "thd"}
        shape = (sinks, 8) if sinks else ()
        yield Case(
            f"{name}, cp {cp}, heads 8:{g}", cp, (n, n), (8, g), (8, 8), allowed[None, None], call,
            split=("balanced",), sinks=shape,
        )  # fmt: skip
        if sinks and g == 2 and cp <= 2:
            yield Case(
                f"{name}, cp {cp}, sinks of queries", cp, (n, n), (8, g), (8, 8),
                allowed[None, None], call, split=("balanced",), sinks=(n, *shape),
            )  # fmt: skip
    for cp, (n, keys), causal in product((1, 2, 4, 8), ((24, 64), (64, 24)), (True, False)):
        yield Case(
            f"{n} queries, {keys} keys, {causal=}, cp {cp}", cp, (n, keys), (8, 2), (8, 8),
            seen(n, keys, causal)[None, None], {"causal": causal}, split=("contiguous", "contiguous"),
        )  # fmt: skip


def _slice(q: list[int], k: list[int], kind: int) -> tuple[int, ...]:
    open_end = 1 << 30
    hi = k[1] - q[1] if kind in (1, 3) else open_end
    lo = k[0] - q[0] if kind in (2, 3) else -open_end
    return *q, *k, lo, hi


def _pieces(n: int, pieces: list[tuple[int, ...]]) -> Callable[[], Mask]:
    """Slices may overlap."""
    return lambda: Mask.union(*(Mask.from_pieces(n, [piece]) for piece in pieces))


def ring_flash_attention() -> Iterator[Case]:
    """test/test_*.py at 8996282: ring, zigzag, stripe, packed ring, packed zigzag and llama3, with
    their documents; on 2, 4 and 8 ranks, alone and as they are compiled.
    """
    edges, even = [0, 16, 48, 112], [0, 16, 64, 160]
    table = {
        "ring": ("contiguous", None), "zigzag": ("zigzag", None), "stripe": ("stripes", None),
        "packed ring": ("contiguous", edges), "packed zigzag": (tuple(even), even),
        "llama3": ("contiguous", edges),
    }  # fmt: skip
    for (name, (split, documents)), cp, compiled in product(
        table.items(), (2, 4, 8), (False, True)
    ):
        n = documents[-1] if documents else 96
        allowed = packed(documents, causal=True) if documents else seen(n, n, True)
        call: dict[str, Any] = {"causal": True}
        if documents:
            call |= {"cu_seqlens": tuple(documents), "qkv_format": "thd"}
        if name == "llama3":
            call |= {"schedule": "gather"}
        way = "graph" if compiled and cp == 2 else "threads"
        yield Case(
            f"{name}, cp {cp}, {compiled=}", cp, (n, n), (5, 5), (16, 16), allowed[None, None],
            call, split=(split,), dtype=BF16, way=way,
        )  # fmt: skip


def ring_attention_pytorch() -> Iterator[Case]:
    """assert.py, assert_attn.py, assert_flash.py, assert_tree_attn.py and assert_zig_zag.py at
    373f75b: sequences of 31 tokens, padded or not; striped; key padding; softclamp; tree attention
    decoding.
    """
    heads, sizes = (8, 4), (16, 16)
    for script, cp, causal, striped in product(
        ("model", "layer"), (2, 4, 8), (False, True), (0, 1)
    ):
        if striped and not causal:
            continue
        allowed = seen(31, 31, causal)[None, None]
        split = "stripes" if striped else "contiguous"
        yield Case(
            f"{script}, cp {cp}, {causal=}, {striped=}", cp, (31, 31), heads, sizes, allowed,
            {"causal": causal}, 2, (split,),
        )  # fmt: skip
    rng = np.random.default_rng(0)
    for causal, padding, clamp in product((False, True), repeat=3):
        keys = rng.random((2, 1, 1, 62)) < 0.5 if padding else np.ones((1, 1, 1, 62), bool)
        allowed = seen(62, 62, causal) & keys
        masks = [np.ascontiguousarray(each[0]) for each in allowed]
        call: dict[str, Any] = {"softcap": 50.0} if clamp else {}
        if padding:
            call |= {"mask": _batch(masks), "layout": Layout.batch([Layout.zigzag(62, 2)] * 2)}
        else:
            call |= {"causal": causal}
        yield Case(
            f"flash, {causal=}, {padding=}, {clamp=}", 2, (62, 62), (2, 2), sizes, allowed, call, 2,
            rejected="unexpected keyword argument 'softcap'" * clamp,
        )  # fmt: skip
    for cp in (2, 4, 8):
        yield Case(
            f"tree attention decoding, cp {cp}", cp, (1, 31), (8, 8), (8, 8),
            np.ones((1, 1, 1, 31), bool), {}, 1, ("contiguous", "contiguous"),
        )  # fmt: skip
        for rotary in (False, True):
            yield Case(
                f"zigzag, cp {cp}, {rotary=}", cp, (32, 32), heads, sizes,
                seen(32, 32, True)[None, None], {"causal": True, "schedule": "gather"}, 2,
            )  # fmt: skip
    for cp in (1, 2, 4, 8):
        yield Case(
            f"cross attention, cp {cp}", cp, (31, 62), heads, sizes,
            np.ones((1, 1, 31, 62), bool), {}, 2, ("contiguous", "contiguous"),
        )  # fmt: skip


def _batch(masks: list[np.ndarray]) -> Callable[[], Mask]:
    return lambda: Mask.batch([Mask.from_dense(mask) for mask in masks])


def long_context_attention() -> Iterator[Case]:
    """test/test_hybrid_attn.py, test_hybrid_qkvpacked_attn.py and test_ulysses_attn.py at 56118e0:
    degrees of Ulysses, implementations of the ring, causal or not, windows and softcap of their
    reference; and its approximate kernels, which compute in 8 bits or leave keys out.
    """
    for cp, ulysses, ring, causal in product(
        (4, 8), (1, 2, 4, 8), ("basic", "zigzag", "strip"), (True, False)
    ):
        if ulysses > cp or (ring == "strip" and not causal):
            continue
        split = {"basic": "contiguous", "zigzag": "zigzag", "strip": "stripes"}[ring]
        yield Case(
            f"hybrid {ring}, cp {cp}, ulysses {ulysses}, {causal=}", cp, (64, 64), (32, 32),
            (8, 8), seen(64, 64, causal)[None, None], {"causal": causal, "heads": ulysses},
            split=(split,), dtype=BF16,
        )  # fmt: skip
    for window, softcap in product(((-1, -1), (9, 0), (9, 4)), (0.0, 30.0)):
        yield Case(
            f"ulysses {window=} {softcap=}", 4, (64, 64), (8, 8), (16, 16),
            seen(64, 64, True, window)[None, None],
            {"causal": True, "window_size": window, "heads": 4}
            | ({"softcap": softcap} if softcap else {}), 2,
            rejected="unexpected keyword argument 'softcap'" * bool(softcap),
        )  # fmt: skip
    for ring in ("basic", "zigzag", "strip"):
        split = {"basic": "contiguous", "zigzag": "zigzag", "strip": "stripes"}[ring]
        yield Case(
            f"packed qkv {ring}", 4, (64, 64), (8, 8), (8, 8), seen(64, 64, True)[None, None],
            {"causal": True, "heads": 2}, 2, (split,), BF16,
        )  # fmt: skip
    approximate = ("sage_fp16", "sage_fp8", "sage_fp8_sm90", "sage_fp16_triton", "sage_auto")
    for kernel in (*approximate, "sparse_sage"):
        yield Case(
            kernel, 4, (64, 64), (8, 8), (8, 8), seen(64, 64, True)[None, None],
            {"causal": True, "kernel": kernel}, rejected=f"kernel={kernel!r}",
        )  # fmt: skip


def ulysses_and_fpdt() -> Iterator[Case]:
    """tests/unit/sequence_parallelism/test_ulysses.py at 4dc7846: exchange of heads by batch,
    tokens, heads and head size on two ranks, heads that do not divide, and FPDT's chunks.
    """
    for (b, s), heads, d in product(product((2, 4), (4, 8)), (4, 8), (16, 32)):
        yield Case(
            f"ulysses {b} x {s}, {heads} heads of {d}", 2, (2 * s, 2 * s), (heads, heads), (d, d),
            seen(2 * s, 2 * s)[None, None], {"heads": 2}, b, ("contiguous",),
        )  # fmt: skip
    for (b, s), heads in product(product((2, 4), (4, 8)), (3, 7)):
        # `auto` takes the ring where heads do not divide
        yield Case(
            f"ulysses {b} x {s}, {heads} heads", 2, (2 * s, 2 * s), (heads, heads), (16, 16),
            seen(2 * s, 2 * s)[None, None], {"heads": "auto"}, b, ("contiguous",),
        )  # fmt: skip
    for b, n, chunk, heads in product((4, 1), (32, 128), (4, 8), (8, 4)):
        yield Case(
            f"fpdt {b} x {n}, chunks of {chunk}, {heads} heads", 2, (n, n), (heads, heads),
            (32, 32), seen(n, n, True)[None, None],
            {"causal": True, "softmax_scale": (32 * heads) ** -0.5}, b, ("stripes",), FP16,
        )  # fmt: skip
