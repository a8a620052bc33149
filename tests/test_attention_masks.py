"""ring_attention under every mask, layout and route, against brute force in float64, on real
processes.
"""

import pytest
import torch

from cp_ring import Layout, Mask, Plan
from cp_ring.testing.oracle import Case, brute_force
from tests.rings import FLOAT32, attend, attend_to_shard, joined, off, truth

N = 157  # no multiple of anything: shards are uneven
DOCUMENTS = [0, 1, 40, 40, 77, 120, 150]  # lengths 1 and 0, and a tail of padding
MASKS = {
    "causal": Mask.causal(N),
    "full": Mask.full(N),
    "causal window": Mask.causal(N, window=(19, 0)),
    "symmetric window": Mask.full(N, window=(7, 30)),
    "documents": Mask.documents(DOCUMENTS, n=N),
    "full documents": Mask.documents(DOCUMENTS, causal=False, n=N),
    "documents and window": Mask.documents(DOCUMENTS, window=(11, 0), n=N),
    "prefix": Mask.prefix(N, 50),
    "document prefixes and window": Mask.prefix(
        N, [1, 10, 0, 37, 5, 30], cu_seqlens=DOCUMENTS, window=(16, 0)
    ),
    "pieces": Mask.from_pieces(
        N, [(0, 90, 3, 60), (20, 157, 70, 157, -64, 3), (100, 120, 0, 8), (60, 61, 60, 66)]
    ),
    "shared prefix": Mask.shared_prefix([(40, [20, 1, 30]), (10, [25, 0, 9])], n=N),
    "shared prefix and window": Mask.shared_prefix(
        [(40, [20, 1, 30]), (10, [25, 0, 9])], n=N, window=(17, 0)
    ),
    "images": Mask.images(N, [(5, 30), (80, 120)], cu_seqlens=[0, 70, 150]),
    "global": Mask.with_global(N, [(0, 3), (77, 90)], (16, 0)),
    "global both ways": Mask.with_global(N, [(70, 75)], (9, 20), causal=False),
    "block causal": Mask.block_causal(N, 25),
    "block diffusion": Mask.block_diffusion(N - 1, 13),
    "tree": Mask.tree([-1, 0, 0, 1, 1, 3, -1], [30, 20, 12, 31, 5, 20, 25], n=N),
    "union": Mask.union(
        Mask.causal(N, (20, 0)),
        Mask.from_pieces(N, [(60, 90, 10, 80)]),
        Mask.documents([0, 50], n=N),
    ),
    "neighborhood": Mask.from_mask_mod(
        lambda b, h, q, k: ((q // 13 - k // 13).abs() <= 1) & ((q % 13 - k % 13).abs() <= 2), N
    ),
    "queries that see nothing": Mask.from_mask_mod(
        lambda b, h, q, k: (k < q) & (q % 5 > 1) & (k // 30 != 2), N
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_equals_brute_force(pool, name):
    """Grouped heads, sinks and two batch rows, at each size of the group: out and all gradients, of
    tiles that are lowered to full and causal squares (cpu), and of bands (reference).
    """
    mask = MASKS[name]
    case, sink = Case.draw(mask.n, b=2, h=4, g=2), torch.tensor([-1.0, 0.0, 0.5, 3.0])
    wanted = truth(case, mask.dense(), sink)
    unseen = torch.from_numpy(~mask.dense().any(1))
    for kernel, cp, layout, how in (
        ("cpu", 1, Layout.contiguous(mask.n, 1), ("direct", "auto")),
        ("cpu", 2, Layout.zigzag(mask.n, 2), ("direct", "auto")),
        ("cpu", 3, Layout.balanced(mask, 3), ("ring", "ring")),
        ("cpu", 4, Layout.zigzag(mask.n, 4), ("direct", "gather")),
        ("cpu", 4, Layout.contiguous(mask.n, 4), ("ring", (0, 1, 1, 2))),
        ("reference", 2, Layout.zigzag(mask.n, 2), ("direct", "auto")),
        ("reference", 4, Layout.contiguous(mask.n, 4), ("ring", (0, 1, 1, 2))),
    ):
        plan = Plan.build(mask, layout, *how)
        plan.verify(rank_plans=True)
        results = attend(case, plan, pool, sink=sink, kernel=kernel)
        assert off(results, wanted) < FLOAT32, (kernel, cp, layout.name)
        # Queries that see no key, as padding, give zeros and get no gradient, never NaN.
        assert not any(x[:, unseen].any() for x in results[:2])


def test_rows_with_different_documents_are_one_stream(pool):
    """b rows of n tokens, each with documents of its own: the plan is for the stream of b * n
    tokens.
    """
    n, rows = 48, [[0, 20, 48], [0, 7, 9, 40]]
    masks = [Mask.documents(row, n=n) for row in rows]
    case = Case.draw(n, b=2)
    wanted = [
        brute_force(Case(*(x[[i]] for x in case)), mask.dense()) for i, mask in enumerate(masks)
    ]
    layout = Layout.zigzag(n, 4)
    plan = Plan.build(Mask.batch(masks), Layout.batch([layout] * 2))
    plan.verify()
    parts = pool.run(attend_to_shard, 4, case, plan, rows=layout)
    assert off(joined(layout, parts), map(torch.cat, zip(*wanted, strict=True))) < FLOAT32
