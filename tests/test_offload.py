"""Saved tensors wait in host memory: the same bits, exact bytes, fetched one layer ahead, and
nothing is left behind.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from cp_ring import Layout, Mask, Offload, ring_attention
from cp_ring.plan import Plan
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case

N, LAYERS, H, G, D, E = 64, 4, 4, 2, 16, 8
MASK = Mask.causal(N, window=(20, 0))


def layers(group, case, plan, offload, **options):
    """Some layers of attention, whose out is the query of the next; the sink is a weight.
    Gradients, and bytes at the end.
    """
    shards = [plan.layout.shard(x, group.rank, 1) for x in case[:3]]
    q, k, v = (x.detach().requires_grad_() for x in shards)
    sink = torch.zeros(H, requires_grad=True)
    hidden = q
    for number in range(LAYERS):
        context = contextlib.nullcontext() if offload is None else offload.layer(keep=[sink])
        with context:
            out = ring_attention(
                hidden, k * (number + 1), v + number, group, plan=plan, sink=sink, **options
            )
        hidden = torch.cat([out, out], -1)
    held = None if offload is None else (offload.host_bytes(), offload.device_bytes())
    return [*torch.autograd.grad(hidden.square().sum(), (q, k, v, sink)), held]


def of_layer(tokens, itemsize):
    return tokens * (H * D + G * D + G * E + H * E) * itemsize + tokens * H * 4


@pytest.mark.parametrize(
    ("heads", "dtype"), [(1, torch.float32), (1, torch.bfloat16), (2, torch.float32)]
)
def test_bits_and_bytes(heads, dtype):
    case = Case.draw(N, h=H, g=G, d=D, e=E, dtype=dtype)
    plan = Plan.build(MASK, Layout.zigzag(N, 2), ulysses=heads)
    stores = [Offload(), Offload()]
    expected = LocalRing(2).run(layers, case, plan, None)
    found = LocalRing(2).run(lambda group: layers(group, case, plan, stores[group.rank]))
    layer = of_layer(N // 2, dtype.itemsize)
    for rank in range(2):
        assert all(
            torch.equal(x, y) for x, y in zip(found[rank][:4], expected[rank][:4], strict=True)
        )
        assert found[rank][4] == (LAYERS * layer, 0)  # after forward
        assert (stores[rank].host_bytes(), stores[rank].device_bytes()) == (0, 0)  # after backward
        assert stores[rank].peak == 2 * layer


def chain(offload, began=lambda number: None):
    """Products whose saved factors wait in host memory, a layer each; `began` is told when the
    backward of one begins.
    """
    factors = [torch.full((8,), float(i + 2), requires_grad=True) for i in range(LAYERS)]
    product = torch.full((8,), 100.0, requires_grad=True)
    for number, factor in enumerate(factors):
        with offload.layer():
            product = product * factor
        product.register_hook(lambda _, number=number: began(number))
    return factors, product


def test_a_layer_is_fetched_when_the_backward_of_the_one_after_it_begins(monkeypatch):
    offload, events = Offload(least=1), []
    factors, product = chain(offload, lambda number: events.append(("backward", number)))
    fetch = offload.fetch

    def told(copy):
        number = int(copy.host[0]) - 2
        if copy.fetched is None and copy.host[0] < LAYERS + 2 and ("fetched", number) not in events:
            events.append(("fetched", number))
        fetch(copy)

    monkeypatch.setattr(offload, "fetch", told)
    product.sum().backward()
    kinds = [[("backward", 3), ("fetched", 3), ("fetched", 2)], [("backward", 2), ("fetched", 1)]]
    assert events == [*kinds[0], *kinds[1], ("backward", 1), ("fetched", 0), ("backward", 0)]
    assert [float(factor.grad[0]) for factor in factors] == [6000.0, 4000.0, 3000.0, 2400.0]


def test_what_shares_a_tensor_shares_its_copy():
    offload, x = Offload(least=1), torch.randn(4, 6, requires_grad=True)
    with offload.layer():
        out = x.exp()  # saves out
    held = offload.host_bytes()
    assert held == out.nbytes
    weight = torch.randn(6, 3, requires_grad=True)
    with offload.sharing():
        y = out.view(2, 2, 6).flatten(0, 1) @ weight  # saves out and the weight
    assert offload.host_bytes() == held
    expected = torch.autograd.grad((x.exp() @ weight).sum(), (x, weight))
    assert all(
        torch.equal(a, b)
        for a, b in zip(torch.autograd.grad(y.sum(), (x, weight)), expected, strict=True)
    )


def test_a_tensor_at_the_address_of_another_is_not_taken_for_it():
    offload, x = Offload(least=1), torch.arange(4.0, requires_grad=True)
    with offload.layer():
        first = (x + 1).square().sum()  # saves x + 1, which is then freed
        second = (x + 2).square().sum()
        third = (x.detach()[None].expand(3, 4) * x).sum()  # saves a tensor with overlaps
    assert torch.equal(
        torch.autograd.grad(first + second + third, x)[0], 2 * (x + 1) + 2 * (x + 2) + 3 * x
    )


def test_nothing_is_left_of_a_pass_without_backward():
    offload = Offload(least=1)
    factors, product = chain(offload)
    assert offload.host_bytes() == 2 * LAYERS * 32
    del factors, product
    assert offload.host_bytes() == 0


def test_backward_may_run_twice():
    offload = Offload(least=1)
    factors, product = chain(offload)
    first = torch.autograd.grad(product.sum(), factors, retain_graph=True)
    second = torch.autograd.grad(product.sum(), factors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_tensors_that_are_put_come_back_in_any_order():
    offload = Offload(least=1)
    x, y = torch.randn(3, 5).T, torch.randn(4)
    (a, b), (c,) = offload.put(x, y), offload.put(x)
    assert a.nbytes == x.nbytes and torch.equal(c.tensor(), x) and c.tensor().stride() == x.stride()
    assert torch.equal(b.tensor(), y) and torch.equal(a.tensor(), x)
    del a, b, c
    assert offload.host_bytes() == 0


def in_place(shared, changed):
    """Gradient of a product that saves a tensor under `sharing`, which is changed in place before
    or after it is saved.
    """
    offload = Offload(least=1)
    x = torch.arange(1.0, 9.0, requires_grad=True)
    weight = torch.full((8,), 3.0, requires_grad=True)
    hidden = x * 1.0
    with offload.layer():
        first = hidden * weight
    if changed == "before":
        hidden += 1.0
    with offload.sharing() if shared else contextlib.nullcontext():
        second = hidden * weight
    if changed == "after":
        hidden += 1.0
    (first.sum() + second.sum()).backward()
    return weight.grad


@pytest.mark.parametrize("changed", ["never", "before", "after"])
def test_sharing_never_gives_elements_of_another_version(changed):
    """The layer's copy is of the tensor as the layer saved it: a changed one is saved anew, and the
    gradient is right.
    """
    before = torch.arange(1.0, 9.0)
    expected = 2 * before + (changed == "before")
    assert torch.equal(in_place(True, changed), expected)


@pytest.mark.parametrize("context", ["layer", "sharing"])
def test_a_kept_tensor_that_is_changed_in_place_raises_as_in_torch(context):
    """Hooks of saved tensors turn torch's own comparison off."""
    for offload in (None, Offload()):
        x, weight = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        hidden = x * 1.0
        with contextlib.nullcontext() if offload is None else getattr(offload, context)():
            out = hidden * weight
        hidden += 1.0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
