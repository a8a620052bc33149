"""Faults that are planted in cp_ring, each of which one assertion about the log must see."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch.distributed import new_group

from cp_ring.comm import heads, transport
from cp_ring.comm.streams import KeyStream
from cp_ring.kernels.flash_aten import FlashAtenKernel
from cp_ring.kernels.transformer_engine import TransformerEngineKernel
from cp_ring.ops import copies


def _lost_wait(kind):
    """Nothing waits for messages of this kind."""
    wait = transport._Works.wait

    def lost(self):
        if self.batch.kind != kind:
            wait(self)

    return lambda: mock.patch.object(transport._Works, "wait", lost)


@contextmanager
def _early_reuse():
    """All slots are the same memory, so that a hop receives where the one before it is computed."""
    allocated, memory = KeyStream._allocated, {}

    def same(self, num_tokens):
        kept = memory.get(id(self))
        if kept is None or len(kept[0]) < num_tokens:
            kept = memory[id(self)] = allocated(self, num_tokens)
        return tuple(x[:num_tokens] for x in kept)

    with mock.patch.object(KeyStream, "_allocated", same):
        yield


def _in_a_hop(work):
    """Does something more before each call of the kernel in forward."""
    attend = FlashAtenKernel.attend

    def more(self, q, *rest):
        work(q)
        return attend(self, q, *rest)

    return lambda: mock.patch.object(FlashAtenKernel, "attend", more)


@contextmanager
def _fork():
    """The kernel runs on a stream of its own that waits for the current one, which does not wait
    for it.
    """
    attend, side = FlashAtenKernel.attend, torch.cuda.Stream()

    def forked(self, *inputs):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return attend(self, *inputs)

    with mock.patch.object(FlashAtenKernel, "attend", forked):
        yield


@contextmanager
def _early_free():
    """Another stream reads a copy of the queries, freed without a word to the allocator."""
    side = torch.cuda.Stream()

    def read(q):
        copy = q.clone()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy.neg_()

    with _in_a_hop(read)():
        yield


@contextmanager
def _swapped():
    """Rank 1 sends values before keys."""
    messages = transport.messages

    def other(transfers):
        found = messages(transfers)
        return found[::-1] if torch.distributed.get_rank() == 1 else found

    with mock.patch.object(transport, "messages", other):
        yield


@contextmanager
def _two_communicators():
    """Of 4 ranks, neighbors exchange heads over groups of their own, and so do rings."""
    near, far = (
        [new_group(ranks) for ranks in cut] for cut in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    )
    rank, cuda = torch.distributed.get_rank(), torch.device("cuda")
    mine = [transport.GroupTransport(group, cuda) for group in (near[rank // 2], far[rank % 2])]
    with mock.patch.object(heads, "sub_transports", lambda *_: mine):
        yield


@contextmanager
def _sends_first():
    """All ranks post what they send as a group of its own, before what they receive."""
    post = transport.GroupTransport.post

    def apart(self, batch):
        post(self, replace(batch, receives=())).wait()
        return post(self, replace(batch, sends=()))

    with mock.patch.object(transport.GroupTransport, "post", apart):
        yield


def _read_at_once():
    """A table on the device is read by streams that do not wait for its copy."""
    return mock.patch.object(copies.Copies, "on", lambda self, device: _first_copy(self, device))


def _first_copy(table, device):
    if device not in table._of:
        table._of[device] = copies._copy(table.values, device)
    return table._of[device].tensor


def _other_layout():
    """TransformerEngine is told of a layout that its calls do not have."""
    call = TransformerEngineKernel._call

    def other(*inputs):
        return call(*inputs)._replace(layout="sb3hd")

    return mock.patch.object(TransformerEngineKernel, "_call", other)


def _other_dtype():
    """TransformerEngine gets queries in another dtype than keys."""
    forward = TransformerEngineKernel.forward

    def other(self, q, *rest, **more):
        return forward(self, q.half(), *rest, **more)

    return mock.patch.object(TransformerEngineKernel, "forward", other)


PLANTS = {
    "lost wait for keys": _lost_wait("keys"),
    "lost wait for gradients": _lost_wait("gradients"),
    "early reuse of a slot": _early_reuse,
    "sync in a hop": _in_a_hop(lambda q: torch.cuda.synchronize()),
    "value in a hop": _in_a_hop(lambda q: q.flatten()[0].item()),
    "copy in a hop": _in_a_hop(lambda q: torch.zeros(8).to(q.device)),
    "memory in a hop": _in_a_hop(lambda q: torch.cuda.caching_allocator_alloc(1 << 25)),
    "early free in a hop": _early_free,
    "fork in a hop": _fork,
    "two communicators": _two_communicators,
    "values before keys": _swapped,
    "launch in a hop": _in_a_hop(torch.neg),
    "sends before receives": _sends_first,
    "tables read at once": _read_at_once,
    "layout of TransformerEngine": _other_layout,
    "dtype of TransformerEngine": _other_dtype,
}
