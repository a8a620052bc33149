"""Plans are the same, byte for byte, as they were: a change that means to plan nothing else is held
to it, and one that means to changes the table here.

Each cell names its mask, layout, ranks, route, schedule and heads, so that no default moves it. The
table has the tokens
whose keys and values travel, a digest of all that the ranks run, and the bytes that ranks sent in
forward and backward: of keys and values, of their gradients, and of the exchange of heads. `python
-m tests.plan.test_same_plans` prints the table anew.
"""

import hashlib

import numpy as np
import pytest
import torch

from cp_ring import ring_attention
from cp_ring.observe.counters import record
from cp_ring.plan import Layout, Mask, Plan
from cp_ring.testing.local_ring import LocalRing

N = 1536
OFFSETS = [0, 40, 300, 301, 800, 1210, 1500]


def _dense():
    query, key = np.indices((96, 96))
    return (key <= query) & ((query - key) % 7 < 4)


MASKS = {
    "causal": Mask.causal(N),
    "full": Mask.full(N),
    "window": Mask.causal(N, (200, 0)),
    "both-ways": Mask.full(N, (90, 30)),
    "documents": Mask.documents(OFFSETS, n=N),
    "documents-full": Mask.documents(OFFSETS, causal=False, n=N),
    "documents-window": Mask.documents(OFFSETS, window=(128, 0), n=N),
    "prefix": Mask.prefix(N, [7, 100, 0, 33, 200, 5], OFFSETS),
    "tree": Mask.tree([-1, 0, 0, 2, -1, 4], [300, 200, 100, 250, 400, 200], N),
    "shared-prefix": Mask.shared_prefix([(400, [100, 200, 50]), (300, [200, 250])], N),
    "images": Mask.images(N, [(64, 320), (700, 956)]),
    "global": Mask.with_global(N, [(0, 16), (600, 610)], (100, 0)),
    "blocks": Mask.block_causal(N, 96),
    "diffusion": Mask.block_diffusion(N // 2 * 2, 64),
    "dense": Mask.from_dense(_dense()),
    "batch": Mask.batch([Mask.causal(768), Mask.documents([0, 300, 768])]),
}


SEVERAL = {1: (0,), 2: (0, 1), 4: (0, 1, 1, 2), 8: (0, 1, 1, 2, 2, 2, 2, 3)}
"""Schedules of hops of several sources, by the number of ranks."""


def _layout(name, n, cp):
    if name == "batch":
        return Layout.batch([Layout.zigzag(n // 2, cp)] * 2)
    if name == "dealt":  # chunks of unequal sizes, in an order that is none
        edges = np.unique(np.linspace(0, 1, 3 * cp + 1) ** 1.2 * n // 1).astype(np.int64)
        return Layout(n, cp, edges, np.arange(len(edges) - 1) * 5 % cp, "dealt")
    return getattr(Layout, name)(n, cp)


TABLE = {
    "causal zigzag 4 direct several 1": "3456 d19a119845b6ac1c 1769472 884736 0",
    "full zigzag 4 direct several 1": "4608 e0226555f783d264 2359296 1179648 0",
    "window zigzag 4 direct several 1": "1192 a301b569cdc66e1b 610304 305152 0",
    "both-ways zigzag 4 direct several 1": "720 f34b4d1ba672430b 368640 184320 0",
    "documents zigzag 4 direct several 1": "1156 1c58669cbc7e8c8c 591872 295936 0",
    "documents-full zigzag 4 direct several 1": "2368 f802214f77e56d27 1212416 606208 0",
    "documents-window zigzag 4 direct several 1": "723 c2a8e526a2d35040 370176 185088 0",
    "prefix zigzag 4 direct several 1": "1196 62d9cd1590d146b7 612352 306176 0",
    "tree zigzag 4 direct several 1": "1858 26e837b6fa8276b3 951296 475648 0",
    "shared-prefix zigzag 4 direct several 1": "2058 f208b6f32cd5175d 1053696 526848 0",
    "images zigzag 4 direct several 1": "3456 b9858d07a380c6db 1769472 884736 0",
    "global zigzag 4 direct several 1": "1138 a654b0a5c33d7b74 582656 291328 0",
    "blocks zigzag 4 direct several 1": "3456 267e0daa6bd59fde 1769472 884736 0",
    "diffusion zigzag 4 direct several 1": "1792 0594b397d2d0c96b 917504 458752 0",
    "dense zigzag 4 direct several 1": "216 a944ead01c71f299 110592 55296 0",
    "batch zigzag 4 direct several 1": "3132 2f02e47bdd607f48 1603584 801792 0",
    "causal zigzag 4 ring ring 1": "4032 6ce0ccdc519e22e7 2064384 884736 0",
    "causal zigzag 8 ring ring 1": "10080 412acf98af679c21 5160960 2064384 0",
    "documents zigzag 4 ring ring 1": "1968 8599b1705e3b90f9 1007616 493312 0",
    "documents zigzag 8 ring ring 1": "5438 4b71076f3e145edc 2784256 1425152 0",
    "window zigzag 4 ring ring 1": "2344 1b6cb6d91d708bc5 1200128 595968 0",
    "window zigzag 8 ring ring 1": "6664 92d2e65d34d4da77 3411968 1560576 0",
    "causal dealt 4 ring several 1": "3704 e83e0d3f9c61ca4b 1896448 1024000 0",
    "tree dealt 4 ring several 1": "2674 f8397ee9f38e1526 1369088 857088 0",
    "full dealt 8 direct gather 1": "10752 b3d401838205ffc9 5505024 2752512 0",
    "prefix dealt 8 direct gather 1": "4490 cf3c10b532655c76 2298880 1149440 0",
    "images dealt 8 direct gather 1": "8646 655f9fa1f90998b1 4426752 2213376 0",
    "causal contiguous 2 direct ring 1": "768 d712124f47f5b84d 393216 196608 0",
    "documents contiguous 2 direct ring 1": "467 6d3a34ed365a8e5e 239104 119552 0",
    "diffusion contiguous 2 direct ring 1": "704 ad261a572354980e 360448 180224 0",
    "causal contiguous 8 direct ring 1": "5376 7697cd3f93abc2cb 2752512 1376256 0",
    "causal contiguous 8 ring ring 1": "5376 c1fda7285d11b013 2752512 2408448 0",
    "window contiguous 8 direct ring 1": "1392 d2778eea7e07afd2 712704 356352 0",
    "window contiguous 8 ring ring 1": "1392 1674ca6df86debc9 712704 2408448 0",
    "causal zigzag 8 direct ring 2": "6912 a280b4986778ff02 1769472 884736 786432",
    "causal zigzag 8 ring ring 2": "8064 1b72112a375f0135 2064384 884736 786432",
    "documents zigzag 8 direct ring 2": "2312 bb44bfabae9bbe00 591872 295936 786432",
    "documents zigzag 8 ring ring 2": "3936 36055a216c6f7145 1007616 493312 786432",
    "full zigzag 8 direct several 4": "6144 e3caf2ee5625fe07 786432 393216 1179648",
    "shared-prefix zigzag 8 direct several 4": "3144 cc7a5a9735fac830 402432 201216 1179648",
    "causal zigzag 4 direct ring 4": "0 70e0b70d56802c79 0 0 1179648",
    "batch zigzag 4 direct ring 4": "0 68b4f370aa74fda8 0 0 1179648",
}


@pytest.mark.parametrize("cell", TABLE)
def test_plan_and_bytes_are_the_same(cell):
    assert _row(_plan(cell)) == TABLE[cell]


def _plan(cell):
    name, layout, cp, route, schedule, heads = cell.split()
    mask, cp, heads = MASKS[name], int(cp), int(heads)
    hops = SEVERAL[cp // heads] if schedule == "several" else schedule
    split = _layout("batch" if name == "batch" else layout, mask.n, cp)
    return Plan.build(mask, split, route=route, schedule=hops, ulysses=heads)


def _row(plan):
    return " ".join(map(str, (*_digest(plan), *_bytes(plan))))


def _digest(plan):
    """Tokens whose keys travel, and the digest of what all ranks run."""
    report = plan.verify(num_slots=3, rank_plans=True)
    digest, moved = hashlib.sha256(), 0
    for rank in range(plan.cp):
        own = plan.rank_plan(rank)
        place, exchange = rank % plan.ulysses, None
        if own.exchange:
            exchange = place, tuple(own.exchange.receives(place).values())
        _put(digest, own.num_tokens, own.batch, own.pieces, own.packed, exchange)
        for hops in (own.hops, own.backward):
            for hop in hops:
                _put_hop(digest, hop, _sources(plan.ring, own.member, hop.index))
        moved += sum(send.tokens for hop in own.hops for send in hop.sends)
    assert report is not None
    return moved, digest.hexdigest()[:16]


def _bytes(plan):
    """Bytes that all ranks send, of float32 tensors of 4 heads of 8: keys, gradients, heads."""
    rows, tokens = plan.layout.rows, plan.layout.tokens_per_rank

    def attend(group):
        size = rows, int(tokens[group.rank]) // rows, 4, 8
        q, k, v = (torch.zeros(size, requires_grad=True) for _ in range(3))
        ring_attention(q, k, v, group, plan=plan).sum().backward()

    with record() as counters:
        LocalRing(plan.cp).run(attend)
    keys, gradients, heads = (
        counters.bytes_by_kind.get(kind, 0) for kind in ("keys", "gradients", "heads")
    )
    return keys, gradients, heads


def _sources(ring, rank, hop):
    """The ranks whose keys, or gradients of keys, lie in the hop's buffers, the nearest first."""
    tables = (
        ring.transfers[ring.transfers.receiver == rank],
        ring.gradients[ring.gradients.sender == rank],
    )
    far = [(rank - rows.owner[rows.hop == hop]) % ring.cp for rows in tables]
    far = np.unique(np.concatenate([*far, [0] * (hop == 0)])).astype(int)
    return tuple(((rank - far) % ring.cp).tolist())


def _put_hop(digest, hop, sources):
    tiles = hop.tiles
    columns = [tiles.q0, tiles.q1, tiles.k0, tiles.k1, tiles.lo, tiles.hi]
    messages = [
        _messages(of) for of in (hop.receives, hop.sends, hop.grad_sends, hop.grad_receives)
    ]
    columns = [column.tolist() for column in (*columns, hop.grad_shift)]
    _put(digest, hop.index, sources, columns, hop.num_keys, hop.num_grads, messages)


def _messages(of):
    return [(x.peer, x.ranges, x.buffer) for x in of]


def _put(digest, *values):
    digest.update(repr(values).encode())


if __name__ == "__main__":
    for cell in TABLE:
        print(f'    "{cell}": "{_row(_plan(cell))}",')
