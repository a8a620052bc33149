"""Ranks that make different calls stop with one line that says in what they differ."""

import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from cp_ring import Layout, ring_attention, roll, unshard
from cp_ring.comm import transport
from cp_ring.comm.agreement import FIRST, LIMIT, Agreement, begin_anew
from cp_ring.comm.groups import transport_for
from cp_ring.errors import PlanError
from cp_ring.megatron.wrapping import replaced
from cp_ring.observe.debug import debugging
from cp_ring.plan.rank_plan import Fact
from cp_ring.plan.records import Transfer
from cp_ring.plan.sizes.device_rates import use
from cp_ring.runtime import RUNTIME
from cp_ring.testing.local_ring import LocalGroup, LocalRing
from tests.rank_pool import LIMIT_S
from tests.rings import rank_of, said

N, CP = 64, 2
CALLS = {
    "mask is <Mask of 64 tokens, (full, 4,096|causal, 2,080) pairs> on rank": (
        {},
        {"causal": True},
    ),
    "mask is .*with other contents": ({"cu_seqlens": [0, 31, 64]}, {"cu_seqlens": [0, 33, 64]}),
    "layout": ({"layout": "zigzag"}, {"layout": "contiguous"}),
    "route": ({}, {"route": "ring"}),
    "wire is (plain|int8) on rank": ({}, {"wire": "int8"}),
    "dtype is torch.b?float16 on rank [01] and torch.b?float16 on": (
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16},
    ),
    "query heads is [24] on rank [01] and [24] on rank [01]": ({}, {"heads": (2, 2)}),
    "key/value heads is [24] on rank [01] and [24] on rank [01]": ({}, {"heads": (4, 4)}),
    "head size is (8|16) on rank [01] and (8|16) on": ({}, {"d": 16}),
    "batch is [12] on rank [01] and [12] on": ({}, {"b": 2}),
    "softmax_scale is 0.[0-9]+ on rank [01] and 0.[0-9]+ on": (
        {"softmax_scale": 0.125},
        {"softmax_scale": 0.0625},
    ),
    "wire_dtype is torch.b?float(16|32) on rank [01] and": (
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "wire_dtype": "float32"},
    ),
}


FRESH = itertools.count(1)


def fresh(calls):
    """The same calls with a scale that no call had before: they are new to both ranks."""
    scale = 1 / next(FRESH)
    return [{"softmax_scale": scale} | call for call in calls]


def attend(group, calls, grad=False):
    """What ring_attention says on this rank, "" for nothing. Rank r makes the call calls[r]."""
    call = dict(calls[rank_of(group)])
    heads, dtype, d, b = (call.pop(name, value) for name, value in
                          (("heads", (4, 2)), ("dtype", torch.float32), ("d", 8), ("b", 1)))  # fmt: skip
    q, k, v = (
        torch.ones(b, N // CP, h, d, dtype=dtype, requires_grad=grad)
        for h in (heads[0], heads[1], heads[1])
    )
    try:
        out = ring_attention(q, k, v, group, **call)
        if grad:
            out.sum().backward()
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("says", CALLS)
def test_all_ranks_stop_with_one_line_that_says_what_differs(pool, says):
    first, second = pool.run(attend, CP, fresh(CALLS[says]))
    assert first == second and "\n" not in first
    assert re.search(says, first), first
    assert pool.run(attend, CP, [{}, {}], grad=True) == ["", ""]


def moved(group):
    """What `unshard` and `roll` say on ranks that disagree."""
    rank, x = group.rank(), torch.ones(1, N // CP)
    layouts = Layout.zigzag(N, CP), Layout.contiguous(N, CP)
    return [
        said(unshard, x, layouts[rank], group),
        said(unshard, torch.ones(1, N // CP, 1 + rank), None, group),
        said(roll, x, -1 - rank, None, group),
    ]


def test_unshard_and_roll_too(pool):
    for layout, size, shift in pool.run(moved, CP):
        assert "layout is Layout.zigzag(n=64, cp=2, chunks=4) on rank" in layout
        assert "size of a token is (1, 1) on rank 0 and (1, 2) on rank 1" in size
        assert "shift is -1 on rank 0 and -2 on rank 1" in shift


def rolled(group):
    """What `roll` says where ranks differ in documents and in what fills their ends, and by shifts
    that are the same roll.
    """
    rank = group.rank()
    x = torch.arange(N // CP)[None] + rank
    return [
        said(roll, x, -1, None, group, cu_seqlens=[0, 20 + rank, N]),
        said(roll, x, -1, None, group, cu_seqlens=[0, N], fill=rank),
        said(roll, x, -1, None, group, cu_seqlens=[0, N] if rank else None),
        said(roll, x, N - 1 if rank else -1, None, group),
        said(roll, x, N - 1 if rank else -1, None, group, cu_seqlens=[0, N]),
    ]


def test_ranks_that_roll_other_documents_stop(pool):
    first, second = pool.run(rolled, CP)
    assert first == second
    documents, fill, none, same, other = first
    assert "cu_seqlens is given on rank 0 and given with other contents on rank 1" in documents
    assert "fill is 0 on rank 0 and 1 on rank 1" in fill
    assert "cu_seqlens is None on rank 0 and given on rank 1" in none
    assert same == "" and "shift is -1 on rank 0 and 63 on rank 1" in other


def backward_in_turn(group, call):
    """What backward says where rank 1 runs that of two equal calls in the other order."""
    x, lines = torch.randn(1, N // CP, 4, 8, requires_grad=True), []
    for order in (slice(group.rank(), group.rank() + 1), slice(None, None, -1)):
        begin_anew()  # and the second time they may agree again
        calls = [call(x, group) for _ in range(2)]
        lines += [said(torch.autograd.grad, out, x, torch.ones_like(out)) for out in calls[order]]
    return lines


def ring_call(x, group):
    return ring_attention(x, x, x, group, causal=True)


def heads_call(x, group):
    return ring_attention(x, x, x, group, causal=True, heads=2)


def shards_call(x, group):
    return unshard(x, None, group)


@pytest.mark.parametrize("call", [ring_call, heads_call, shards_call])
def test_backward_calls_in_different_orders_stop_with_both_calls(pool, call):
    """Messages of equal calls have equal sizes: the gradients would be those of the other call."""
    first, second = pool.run(backward_in_turn, CP, call)
    assert first == second
    assert re.search("gradient is that of call .* on rank 0 and that of call", first[0]), first
    assert first[1:] == ["", ""]
    with pytest.raises(PlanError, match=r"gradient is that of call .*on rank .* and that of call"):
        LocalRing(CP).run(in_turn_on_threads, call)


def in_turn_on_threads(group, call):
    x = torch.randn(1, N // CP, 4, 8, requires_grad=True)
    calls = [call(x, group) for _ in range(2)]
    for out in calls if group.rank else calls[::-1]:
        torch.autograd.grad(out, x, torch.ones_like(out))


def alone(_, limit_s):
    """What ranks say that another one does not follow: in the first call of a group, in a new call
    while the other repeats a known one, and in backward. Each time in a group of its own.
    """
    rank = dist.get_rank()
    x = torch.randn(1, N // CP, 2, 8, requires_grad=True)
    unused, group, other = (dist.new_group([0, 1]) for _ in range(3))
    if rank > 1:
        dist.barrier()
        return []
    ring_attention(x, x, x, group)
    out = ring_attention(x, x, x, other)
    LIMIT.value = limit_s
    new = said(ring_attention, x, x, x, group, causal=True) if rank else ""
    if rank:
        dist.destroy_process_group(group)  # as the end of the process does
        dist.barrier()
        lines = [new]
    else:
        dist.barrier()  # rank 1 has waited in vain
        lines = [said(ring_attention, x, x, x, group)]
        lines += [said(ring_attention, x, x, x, unused), said(out.sum().backward)]
        dist.destroy_process_group(group)
    for each in (unused, other):
        dist.destroy_process_group(each)
    LIMIT.value = None
    return lines


def test_a_rank_that_does_not_come_is_named_in_time(pool):
    (known, first, gradient), (new,) = pool.run(alone, 4, 0.5)[:CP]
    assert (
        "rank 0 of 2 made the first call of its group, and rank 1 of the group made none" in first
    )
    assert "within 0.5 s" in first
    assert (
        "rank 1 of 2 made a call that is new to it (mask <Mask of 64 tokens, causal, 2,080 pairs>"
        in new
    )
    assert "and rank 0 of the group made none within 0.5 s" in new
    assert "calls: mask is <Mask of 64 tokens, full, 4,096 pairs> on rank 0 and <Mask of" in known
    # the place is that of the layer that an earlier test of the pool has run last
    assert re.search(r"new to it \(gradient that of call 1.*\), and rank 1 of the group", gradient)


def that_cannot_start(_):
    """What ranks say of messages whose connection was closed before they start, and of messages on
    NCCL, where such an error is one of memory or of the rank's own device.
    """

    def closed(works, group, receives, sends, tag):
        works += [None] * len(receives)  # the first that is sent fails
        raise RuntimeError("Connection closed by peer")

    x, group = torch.randn(1, N // CP, 2, 8), dist.new_group([0, 1])
    if dist.get_rank() >= CP:
        return []
    ring_attention(x, x, x, group)
    errors = []
    for blocks in (True, False):
        transport_for(group, x.device).blocks = blocks
        with replaced((transport, "_start", closed)), pytest.raises(RuntimeError) as error:
            ring_attention(x, x, x, group)
        errors.append(str(error.value))
    dist.destroy_process_group(group)
    return errors


def test_messages_that_cannot_start_name_their_rank(pool):
    for rank, (line, on_nccl) in enumerate(pool.run(that_cannot_start, 4)[:CP]):
        assert line.startswith(f"rank {rank} of 2 waits in vain for rank {1 - rank} (mask")
        assert line.endswith("): Connection closed by peer")
        assert on_nccl == "Connection closed by peer"


def within_the_timeout_of_a_group(_):
    """What rank 0 says of calls that rank 1 does not make, in groups with a timeout of a second."""
    x = torch.randn(1, N // CP, 2, 8)
    new, known = (dist.new_group([0, 1], timeout=timedelta(seconds=1)) for _ in range(2))
    lines = []
    if dist.get_rank() < CP:
        ring_attention(x, x, x, known)
        if dist.get_rank() == 0:
            lines = [said(ring_attention, x, x, x, new)]
            lines += [said(ring_attention, x, x, x, known, causal=True)]
    dist.barrier()  # of all ranks, which has the timeout of the world
    for group in (new, known) if lines or dist.get_rank() == 1 else ():
        dist.destroy_process_group(group)
    return lines


def test_a_meeting_ends_at_the_timeout_of_its_group(pool):
    (first, later), *others = pool.run(within_the_timeout_of_a_group, 4)
    assert others == [[]] * 3
    for line in (first, later):
        assert "rank 1 of the group made none within 1 s" in line


def second_life(group):
    """What ranks that differ say in the first call after a reset, with the keys of an earlier life
    in the store. All ranks of the pool are reset, because they share other groups.
    """
    x = torch.randn(1, N // 4, 2, 8)
    lines = []
    for causal in (True, group.rank() == 0):
        RUNTIME.reset()
        lines.append(said(ring_attention, x, x, x, group, causal=causal))
    return lines


def test_the_first_call_after_a_reset_is_compared(pool):
    first, *others = pool.run(second_life, 4)
    assert others == [first] * 3 and first[0] == ""
    assert "mask is <Mask of 64 tokens, causal, 2,080 pairs> on rank 0 and" in first[1]


def on_two_kinds_of_gpus(group):
    """What ranks say whose first rank has another GPU, in layouts and hops that they choose."""
    x = torch.randn(1, 64, 2, 8)
    RUNTIME.reset()
    use("h100" if group.rank() == 0 else "cpu")
    line = said(ring_attention, x, x, x, group, cu_seqlens=[0, 77, 123, 256], layout="balanced")
    RUNTIME.reset()
    return line


def test_ranks_with_gpus_of_two_kinds_stop(pool):
    first, *others = pool.run(on_two_kinds_of_gpus, 4)
    assert others == [first] * 3 and re.search("layout is .* on rank 0 and .* on rank", first)


def plan_is(value):
    """The facts of a call with this plan."""
    return lambda: [Fact.of("plan", value)]


def wait_at_most(agreement, seconds):
    agreement._meetings._store.set_timeout(timedelta(seconds=seconds))


def together(case, *args):
    """`case(agreement, rank, *args)` on two ranks that share a store; the results, or the errors."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=LIMIT_S))

    def one(rank):
        try:
            return case(Agreement(store, rank, 2), rank, *args)
        except PlanError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(one, range(2)))


def test_a_difference_between_two_comparisons_is_found_at_the_next():
    def case(agreement, rank):
        for number in range(FIRST + 4):
            name = "other" if rank and number == FIRST else str(number)
            agreement.check(name, plan_is(name), every=4)
            assert number <= FIRST + 3
        return "none"

    lines = {str(error) for error in together(case)}
    assert len(lines) == 1 and "an earlier call of rank" in lines.pop()


@pytest.mark.parametrize("kind", ["keys", "gradients"])
@pytest.mark.parametrize("active", [True, False])
def test_under_debugging_what_is_not_received_is_nan(monkeypatch, kind, active):
    post = LocalGroup.post
    lost = threading.local()

    def losing_post(self, batch):
        pending = post(self, batch)
        if batch.kind != kind or not batch.receives:
            return pending
        lost.pending = pending
        return type("Lost", (), {"wait": lambda _: None})()

    def case(group):
        x = torch.ones(1, N // CP, 2, 8, requires_grad=True)
        out = ring_attention(x, x, x, group)
        out.sum().backward()
        return [out.detach(), x.grad]

    monkeypatch.setattr(LocalGroup, "post", losing_post)
    with debugging() if active else nullcontext():
        results = LocalRing(CP).run(case)
    if active:
        assert all(rank[kind == "gradients"].isnan().any() for rank in results)
    monkeypatch.undo()
    with debugging(active):
        assert not any(x.isnan().any() for rank in LocalRing(CP).run(case) for x in rank)


def test_known_calls_in_another_order_are_found_at_the_next_new_one():
    """Both calls are known on both ranks, so none is compared when it is made; with gloo, no
    message of theirs arrives.
    """

    def case(agreement, rank):
        calls = {name: plan_is(name) for name in "abc"}
        for name in "aab":
            agreement.check(name, calls[name])
        tags = [agreement.tag]
        for name in ("a", "b") if rank else ("b", "a"):
            agreement.check(name, calls[name])
            tags.append(agreement.tag)
        assert "an earlier call of rank 1 was not that of rank 0" in said(
            agreement.check, "c", calls["c"]
        )
        agreement.check("a", calls["a"])  # and they may agree again
        return tags, agreement.tag

    (tags, again), (others, other) = together(case)
    assert tags[0] == others[0] and tags[1] != others[1] and tags[2] != others[2]
    assert again == other


def test_a_wrong_order_of_backward_calls_has_no_known_step():
    agreement, seen = Agreement(dist.HashStore(), 0, 1), []
    agreement._compare = lambda key, facts, every: seen.append(key)
    for order in ((2, 1), (2, 1), (1, 2)):
        calls = {n: agreement.check("a", list) for n in (1, 2)}
        for number in order:
            calls[number]("")
    assert seen[6:8] != seen[10:12] and not {*seen[10:12]} & {*seen[2:4], *seen[6:8]}


ORDERS = {"of known steps": [(2, 1), (2, 1), None], "known from before": [(2, 1), (1, 2), None]}


@pytest.mark.parametrize("orders", ORDERS)
def test_known_backward_calls_in_another_order_stop_with_both_calls(orders):
    """Backward of two calls of one shape. Where a rank knows what it does, its messages do not come;
    the error of the last wait then compares the calls.
    """

    def case(agreement, rank):
        for order in ORDERS[orders] * 2:
            calls = {n: agreement.check("a", plan_is(7)) for n in (1, 2)}
            if order is not None:
                for number in order:
                    calls[number]("")
        with pytest.raises(PlanError) as caught:
            calls[2 - rank]("")
            raise agreement.explain(RuntimeError("no message"), [1 - rank])
        return str(caught.value)

    first, second = together(case)
    assert first == second
    assert "gradient is that of call 12 on rank 0 and that of call 11 on rank 1" in first


def test_a_known_call_where_another_rank_makes_a_new_one_stops_both():
    def case(agreement, rank):
        for key in ["a", "a", "ab"[rank]]:
            agreement.check(key, plan_is(key))
        raise agreement.explain(RuntimeError("no message"), [1 - rank])

    first, second = map(str, together(case))
    assert first == second and "plan is a on rank 0 and b on rank 1" in first


@pytest.mark.parametrize("follows", [False, True])
def test_a_rank_that_gave_up_a_call_and_one_that_makes_another_stop(follows):
    """The second does not wait, whether the first calls again or has ended."""
    alone = threading.Event()

    def case(agreement, rank):
        agreement.check("a", plan_is("a"))
        if rank:
            wait_at_most(agreement, 0.05)
            assert said(agreement.check, "b", plan_is("b"))
            wait_at_most(agreement, LIMIT_S)
            alone.set()
        alone.wait()
        if rank and not follows:
            return ""
        name = "db"[rank]
        return said(agreement.check, name, plan_is(name))

    first, second = together(case)
    assert "plan is d on rank 0 and b on rank 1" in first and second == (first if follows else "")


@pytest.mark.parametrize("compared", [False, True], ids=["new calls", "each call"])
def test_a_rank_may_call_again_when_nobody_came(compared):
    """Rank 1 comes first, gives up, and makes the same call again when rank 0 comes."""
    alone = threading.Event()

    def case(agreement, rank):
        def call(name):
            return agreement.check(name, plan_is(name))

        for name in "aba" if compared else "a":
            call(name)
        if rank:
            wait_at_most(agreement, 0.05)
            line = said(call, "a" if compared else "b")
            assert "rank 1 of 2 made a call that is new to it (plan" in line
            assert "rank 0 of the group made none within 0.05 s" in line
            wait_at_most(agreement, LIMIT_S)
            alone.set()
        alone.wait()
        call("a" if compared else "b")("")
        call("c")("")
        return agreement.tag, agreement._calls

    with debugging() if compared else nullcontext():
        first, second = together(case)
    assert first == second


def test_the_message_that_fails_names_its_rank():
    class Work:
        def __init__(self, error=None):
            self.error = error

        def wait(self):
            if self.error:
                raise self.error

    x = torch.zeros(2)
    batch = transport.MessageBatch(
        [(Transfer(peer, ((0, 2),)), [x]) for peer in (3, 1)],
        [(Transfer(peer, ((0, 1), (1, 2))), [x]) for peer in (1, 2)],
    )
    for failing, peers in ((0, [1]), (1, [1]), (3, [2]), (4, [3]), (5, [1])):
        works = [Work(RuntimeError("closed") if i == failing else None) for i in range(6)]
        told = transport._Works(works, batch, lambda error, named: PlanError(str([*named])))
        assert said(told.wait) == str(peers)
    told = transport._Works([Work(RuntimeError())], batch, lambda error, named: PlanError([*named]))
    assert said(told.wait) == "[1, 1, 2, 2, 3, 1]"  # NCCL: all of the batch, by `explain` sorted


def test_an_error_of_messages_names_the_rank_that_does_not_send(monkeypatch):
    monkeypatch.setattr("cp_ring.comm.agreement._GRACE_S", 0.01)
    agreement = Agreement(dist.HashStore(), 0, 3)
    agreement.check("a", plan_is(7), every=0)
    error = agreement.explain(RuntimeError("Timed out"), [2, 1, 2])
    assert str(error) == "rank 0 of 3 waits in vain for rank 1, 2 (plan 7): Timed out"
