"""Sparse attention over a ring against dense torch in float64: selection, outputs, gradients, the
loss of the indexer; and faults, each of which must show.
"""

import functools
import math

import pytest
import torch

from cp_ring import Layout, Mask
from cp_ring.comm import sparse_blocks, sparse_loop
from cp_ring.comm.sparse_loop import IndexerLoss, SparseAttention, SparseCall, select
from cp_ring.observe import counters, debug
from cp_ring.observe.watchdog import Place
from cp_ring.plan.plan import PlanSpec, plan
from cp_ring.testing.local_ring import LocalRing

B, H, D, C, I, E, N, TOPK = 2, 3, 10, 6, 4, 5, 64, 9
COEFF, SCALE = 0.7, 0.3
MASKS = {
    "causal": Mask.causal(N),
    "documents": Mask.documents([0, 5, 19, 37, 64]),
    "window": Mask.causal(N, window=(20, 0)),
}
# scores of the selected keys are kept in float32
BOUND = {"": 1e-12, "whole": 1e-12, "selected": 2e-6}


def inputs(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    shapes = (N, B, H, D), (N, B, D), (N, B, I, E), (N, B, I), (N, B, E)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def allowed(mask: Mask) -> torch.Tensor:
    return torch.from_numpy(mask.dense())


def dense(mask, loss, relu, tensors, counted=None):
    """out [N, B, H, C], the loss, and the selected pairs [B, N, N], of one rank."""
    q, latents, qi, weights, ki = tensors
    seen = allowed(mask)
    index = torch.einsum("sbie,tbe->bsit", qi, ki)
    index = ((index.relu() if relu else index) * weights.transpose(0, 1)[..., None]).sum(2)
    index = index.masked_fill(~seen, -torch.inf)
    order = index.detach().float().sort(dim=-1, descending=True, stable=True).indices[..., :TOPK]
    chosen = torch.zeros_like(index, dtype=torch.bool).scatter_(-1, order, True) & seen
    scores = torch.einsum("sbhd,tbd->bhst", q, latents) * SCALE
    attention = scores.masked_fill(~chosen[:, None], -torch.inf).softmax(-1).nan_to_num()
    out = torch.einsum("bhst,tbc->sbhc", attention, latents[..., :C])
    if not loss:
        return out, None, chosen
    keys = seen.expand_as(chosen) if loss == "whole" else chosen
    target = (
        scores.detach().masked_fill(~keys[:, None], -torch.inf).softmax(-1).nan_to_num().mean(1)
    )
    log = index.masked_fill(~keys, -torch.inf).log_softmax(-1)
    gap = (target * (target.clamp_min(1e-10).log() - log)).masked_fill(~keys, 0.0)
    if counted is not None:
        gap = gap * counted[..., None]
    return out, COEFF * gap.sum(), chosen


def ring(mask, cp, spec, loss, relu, tensors, dout, counted=None, hold=False):
    """The same on `cp` ranks: out, gradients of the five inputs, the loss."""
    layout = Layout.zigzag(N, cp) if isinstance(spec.layout, str) else spec.layout
    made = plan(mask, cp, PlanSpec(layout, spec.route, spec.schedule))

    def case(group):
        positions = torch.from_numpy(layout.positions(group.rank))
        mine = [x.detach()[positions].requires_grad_() for x in tensors]
        losses = []
        of_loss = loss and IndexerLoss(
            COEFF, loss == "whole", H, lambda x: None,
            None if counted is None else counted[:, positions], losses.append,
        )  # fmt: skip
        call = SparseCall(
            made.rank_plan(group.rank), group if cp > 1 else None, Place(), group.rank, TOPK, SCALE,
            C, relu, 2, tensors[0].dtype, hold, of_loss or None,
        )  # fmt: skip
        q, latents, *indexer = mine
        selection = select(call, indexer[0], indexer[1], indexer[2], positions)
        given = indexer if loss else (None,) * 3
        out, zero = SparseAttention.apply(call, selection, q, latents, *given)
        ((out * dout[positions]).sum() + zero).backward()
        return positions, out.detach(), [x.grad for x in mine], sum(losses)

    results = LocalRing(cp).run(case)
    out, grads = torch.zeros_like(dout), [torch.zeros_like(x) for x in tensors]
    for positions, own, of_own, _ in results:
        out[positions] = own
        for total, grad in zip(grads, of_own, strict=True):
            if grad is not None:
                total[positions] = grad
    return out, grads, sum(each for *_, each in results)


def error(found, truth):
    return float((found - truth).norm() / truth.norm().clamp_min(1e-30))


@functools.cache
def truth(mask, loss, relu, dtype=torch.float64):
    tensors = inputs()
    dout = torch.randn(N, B, H, C, dtype=torch.float64)
    out, value, _ = dense(MASKS[mask], loss, relu, tensors)
    (out * dout).sum().add(0 if value is None else value).backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]
    return tensors, dout, out.detach(), grads, None if value is None else value.detach()


def worst(mask, cp, spec, loss, relu):
    tensors, dout, out, grads, value = truth(mask, loss, relu)
    found, of_found, its = ring(MASKS[mask], cp, spec, loss, relu, tensors, dout)
    errors = [error(found, out), *(error(a, b) for a, b in zip(of_found, grads, strict=True))]
    return max(errors + ([abs(float(its / value) - 1)] if loss else []))


@pytest.mark.parametrize("loss", BOUND)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_as_one_rank(cp, loss):
    assert worst("causal", cp, PlanSpec(), loss, relu=True) < BOUND[loss]


@pytest.mark.parametrize("mask", ["documents", "window"])
@pytest.mark.parametrize("spec", [PlanSpec(route="ring"), PlanSpec(schedule="gather")])
def test_masks_routes_and_schedules(mask, spec):
    for loss, relu in (("whole", False), ("selected", True)):
        assert worst(mask, 4, spec, loss, relu) < BOUND[loss]


@pytest.mark.parametrize("block", [1, 500])
def test_in_blocks_of_queries_with_buffers_of_nan(monkeypatch, block):
    monkeypatch.setattr(sparse_blocks, "BLOCK", block)
    with debug.debugging():
        for loss in ("whole", "selected"):
            assert worst("documents", 2, PlanSpec(), loss, relu=True) < BOUND[loss]


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("loss", BOUND)
@pytest.mark.parametrize("cp", [2, 4])
def test_bytes_are_those_of_the_plan_and_what_is_held_does_not_come_again(cp, loss, hold):
    tensors, dout, out, grads, _ = truth("documents", loss, True)
    report = plan(MASKS["documents"], cp, PlanSpec(Layout.zigzag(N, cp))).verify()
    with counters.record() as sent:
        found, of_found, _ = ring(
            MASKS["documents"], cp, PlanSpec(), loss, True, tensors, dout, hold=hold
        )
    again = 8 * B * (D + (E if loss else 0))
    keys, leaving = int(report.keys_in.sum()), int(report.grads_in.sum())
    arriving = 4 + 8 * B * (E + D) + again * (not hold)
    assert sent.bytes_by_kind == {"keys": keys * arriving, "gradients": leaving * again}
    errors = [error(found, out), *(error(a, b) for a, b in zip(of_found, grads, strict=True))]
    assert max(errors) < BOUND[loss]


def test_queries_that_do_not_count_have_no_loss():
    tensors, dout = inputs(), torch.ones(N, B, H, C, dtype=torch.float64)
    counted = torch.arange(N).expand(B, N) % 3 > 0
    _, value, _ = dense(MASKS["causal"], "whole", True, tensors, counted)
    value.backward()
    _, grads, its = ring(MASKS["causal"], 2, PlanSpec(), "whole", True, tensors, dout, counted)
    assert abs(float(its / value.detach()) - 1) < 1e-12
    assert error(grads[4], tensors[4].grad) < 1e-12


def test_of_equal_scores_the_earlier_positions_are_selected_on_any_number_of_ranks():
    """All weights but those of one head are 0, and so are most scores after relu."""
    tensors = [x.detach() for x in inputs(torch.bfloat16)]
    tensors[3][..., 1:] = 0
    tensors = [x.requires_grad_() for x in tensors]
    dout = torch.ones(N, B, H, C, dtype=torch.bfloat16)
    outs = [
        ring(MASKS["causal"], cp, PlanSpec(), "", True, tensors, dout)[0].float()
        for cp in (1, 2, 4)
    ]
    wide = [x.double() for x in tensors]
    truth, _, chosen = dense(MASKS["causal"], "", True, wide)
    index = torch.einsum("sbe,tbe->bst", wide[2][:, :, 0], wide[4]).relu()
    index *= wide[3][:, :, 0].T[..., None]
    equal = chosen & (index == 0) & (torch.arange(N) < 63)
    assert int(equal.sum()) > 100  # ties are among those selected
    for out in outs:
        assert error(out.double(), truth) < 0.01


def test_scores_keep_their_order_as_whole_numbers_and_come_back():
    scores = torch.tensor([-math.inf, -3.5, -1e-30, -0.0, 0.0, 1e-38, 2.25, math.inf])
    found = sparse_blocks.ordered(scores, torch.arange(8))
    assert found.argsort(descending=True).tolist() == [7, 6, 5, 3, 4, 2, 1, 0]
    again, places = sparse_blocks.read(found)
    assert again.tolist() == scores.tolist() and places.tolist() == list(range(8))


def _of_the_wrong_rank(attend, call, selection, q, latents, held):
    return attend(call, selection, q, latents.flip(0), held)


def _without_the_last_hop(chosen, selection, hop, size):
    return chosen(selection, hop, size) if hop.index < 2 else iter(())


def _of_the_last_hop(ordered, scores, positions):
    """Keys of other ranks never win."""
    return ordered(scores - 1e6 * (positions.min() > 0), positions)


def _positions_of_the_rank(select, call, q, weights, k, positions):
    return select(call, q, weights, k, torch.arange(len(positions)))


@pytest.mark.parametrize(
    ("name", "faulty"),
    [
        ("_attend", _of_the_wrong_rank),
        ("chosen", _without_the_last_hop),
        ("ordered", _of_the_last_hop),
        ("select", _positions_of_the_rank),
    ],
)
def test_planted_faults_show(monkeypatch, name, faulty):
    right = getattr(sparse_loop, name)
    monkeypatch.setattr(sparse_loop, name, functools.partial(faulty, right))
    monkeypatch.setitem(globals(), "select", sparse_loop.select)
    assert worst("causal", 4, PlanSpec(schedule="ring"), "", relu=True) > 1e-2
