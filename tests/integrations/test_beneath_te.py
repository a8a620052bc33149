"""The ring beneath TransformerEngine's own context parallelism, on processes, with the arguments
that TransformerEngine's backends give it.
"""

import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from cp_ring import Options, patches
from cp_ring.errors import ConfigError
from cp_ring.integrations import transformer_engine as beneath
from cp_ring.integrations.transformer_engine import use_ring
from cp_ring.megatron.settings import configure
from cp_ring.testing.oracle import Case
from tests import rings
from tests.integrations import te_stand_in
from tests.integrations.te_stand_in import BACKENDS, Left, forward, installed
from tests.peers.attend import LIMITS
from tests.peers.tables import packed, seen, transformer_engine
from tests.rings import refused, said, truth

FULL = (-1, -1)
ALL = ("p2p", "all_gather", "a2a", "a2a+p2p")
LIMITS = LIMITS | {torch.float64: 1e-12}


@dataclass(frozen=True)
class Call:
    """A call of `DotProductAttention` in the format `form`; `edges` are padded documents, `ends`
    where their tokens end, `n` the tokens of the whole sequence.
    """

    cp: int = 2
    form: str = "sbhd"
    comm: str = "p2p"
    causal: bool = True
    window: tuple = FULL
    edges: tuple = ()
    ends: tuple = ()
    n: int = 64
    heads: tuple = (4, 2)
    sizes: tuple = (16, 16)
    batch: int = 2
    sink: bool = False
    dtype: torch.dtype = torch.float32
    flash: bool = False

    def allowed(self):
        if not self.edges:
            return seen(self.n, self.n, self.causal, self.window)
        allowed = np.zeros((self.n, self.n), bool)
        end = self.edges[-1]
        ends = list(self.ends or self.edges[1:])
        allowed[:end, :end] = packed(self.edges, ends, causal=self.causal, window=self.window)
        return allowed

    def draw(self):
        """q, k, v, dout [b, n, heads, size], and the sink [h] or None."""
        b, (h, g), (d, e) = 1 if self.edges else self.batch, self.heads, self.sizes
        case = Case.draw(self.n, seed=5, dtype=self.dtype, b=b, h=h, g=g, d=d, e=e)
        return case, torch.linspace(-1, 2, h) if self.sink else None

    def tokens(self, rank):
        """Of a rank: two chunks of each document, and its part of what is behind them."""
        edges, found = self.edges or (0, self.n), []
        for start, end in pairwise(edges):
            size = (end - start) // (2 * self.cp)
            chunks = (rank, 2 * self.cp - 1 - rank)
            found += [torch.arange(x * size, (x + 1) * size) + start for x in chunks]
        return torch.cat([*found, torch.arange(edges[-1], self.n).chunk(self.cp)[rank]]
                         if edges[-1] < self.n else found)  # fmt: skip


PACKED = Call(form="thd", edges=(0, 24, 64))


def parts_of(call, group):
    """q, k and v of this rank."""
    return [shard(call, x, dist.get_rank(group)) for x in call.draw()[0][:3]]


def _groups(group, comm):
    """What TransformerEngine gets: a group, or one that exchanges heads and one for the ring."""
    if comm != "a2a+p2p":
        return group
    rank, size = dist.get_rank(), dist.get_world_size(group)
    wanted = [[rank - rank % 2, rank - rank % 2 + 1], [*range(rank % 2, size, 2)]]
    if size == 4 and not _made(wanted[1]):
        for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]):
            dist.new_group(ranks)
    return [_made(ranks)[-1] for ranks in wanted]


def _made(ranks):
    groups = dist.distributed_c10d._world.pg_group_ranks
    return [group for group, places in groups.items() if list(places) == ranks]


def arguments(call, group, version="2.20.2"):
    """Of `forward`, but for tensors and the package."""
    more = {}
    if call.form == "thd":
        ends = np.asarray(call.ends or call.edges[1:])
        real = np.cumsum([0, *(ends - np.asarray(call.edges[:-1]))])
        real, edges = (torch.tensor([*x], dtype=torch.int32) for x in (real, call.edges))
        more["cu_seqlens"] = real, (edges if call.ends else None)
    kind = "padding" * (call.form == "thd"), "causal" * call.causal
    return more | {
        "version": version,
        "qkv_format": call.form,
        "attn_mask_type": "_".join(filter(None, kind)) or "no_mask",
        "window_size": (call.window[0], 0 if call.causal else call.window[1]),
        "cp_group": _groups(group, call.comm),
        "cp_global_ranks": dist.get_process_group_ranks(group),
        "cp_comm_type": call.comm,
    }


def shard(call, x, rank):
    """The tokens of a rank in the format of the call."""
    part = x[:, call.tokens(rank)]
    return {"thd": part[0], "bshd": part, "sbhd": part.transpose(0, 1)}[call.form].contiguous()


@contextmanager
def ring(version="2.20.2", *given, **options):
    """TransformerEngine, whose calls end in the ring while this lasts; and pytest's patches."""
    with installed(version) as package, pytest.MonkeyPatch.context() as patch:
        undo = use_ring(*given, **options)
        yield package, patch
        undo()


def on_rank(group, calls, version="2.20.2", fault=None):
    """out, dq, dk, dv [b, s, heads, size] and the gradient of the sink, or "left", of each call."""
    with ring(version, ALL) as (package, patch), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if fault:
            PLANTED[fault](patch)
        return [_attend(group, call, package, version) for call in calls]


def _attend(group, call, package, version):
    rank = dist.get_rank(group)
    tensors, sink = call.draw()
    q, k, v, dout = (shard(call, x, rank) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v, sink) if x is not None]
    BACKENDS.fused = not call.flash
    try:
        out = forward(package, *leaves[:3], softmax_offset=leaves[3] if call.sink else None,
                      **arguments(call, group, version))  # fmt: skip
    except Left:
        return "left"
    finally:
        BACKENDS.fused = True
    grads = torch.autograd.grad(out, leaves, dout)
    back = {"thd": lambda x: x[None], "bshd": lambda x: x, "sbhd": lambda x: x.transpose(0, 1)}
    parts = [back[call.form](x) for x in (out.detach(), *grads[:3])]
    return [*parts, *grads[3:]]


def off(call, parts):
    """The largest error of out and gradients, divided by its limit; NaN where one has NaN."""
    case, sink = call.draw()
    wanted = truth(case, call.allowed(), sink)
    whole = [torch.full_like(x, np.nan) for x in wanted[:4]]
    for rank, part in enumerate(parts):
        for x, mine in zip(whole, part[:4], strict=True):
            x[:, call.tokens(rank)] = mine.to(x)
    found = [*whole, *([sum(part[4] for part in parts)] if call.sink else [])]
    return rings.off(found, wanted) / LIMITS[call.dtype]


def run(pool, calls, **more):
    """How many calls the ring ran and TransformerEngine, and the names of those that are wrong."""
    counts, wrong = Counter(), []
    for cp in sorted({call.cp for call in calls}):
        of_size = [call for call in calls if call.cp == cp]
        results = zip(*pool.run(on_rank, cp, of_size, **more), strict=True)
        for call, parts in zip(of_size, results, strict=True):
            left = parts[0] == "left"
            counts["left" if left else "ring"] += 1
            if not left and not off(call, parts) < 1:
                wrong.append(call)
    return counts, wrong


def of_table():
    """TransformerEngine's own cases, on 2 and 4 ranks."""
    for case, cp in product(transformer_engine(), (2, 4)):
        if not case.rejected:
            said = {x: tuple(y) if isinstance(y, list) else y for x, y in case.table.items()}
            yield Call(
                cp, **said | {"ends": said.get("ends", ()) if "pads" in case.name else ()},
                heads=case.heads, sizes=case.sizes, batch=case.batch, sink=bool(case.sinks),
                dtype=case.dtype,
            )  # fmt: skip


def further():
    """What it rejects or has no case of: windows and sinks around rings, tails, odd heads."""
    for cp, form, causal, window, sink in product(
        (2, 4), ("sbhd", "bshd", "thd"), (True, False), (FULL, (5, 0), (3, 9)), (False, True)
    ):
        call = Call(cp, form, "p2p", causal, window, sink=sink)
        if form != "thd":
            yield call
            continue
        edges = (0, 16, 16, 40, 48)
        yield replace(call, edges=edges, n=48)
        yield replace(call, edges=edges, ends=(13, 16, 17, 48), n=48)
        yield replace(call, edges=edges, ends=(16, 16, 16, 41), n=52)
    for cp, comm, heads, sink in product((2, 4), ALL, ((3, 1), (6, 3)), (False, True)):
        yield Call(cp, "sbhd", comm, True, (7, 0), heads=heads, sink=sink)
    for cp, form, flash in product((2, 4), ("sbhd", "thd"), (False, True)):
        edges = (0, 24, 64) if form == "thd" else ()
        yield Call(cp, form, edges=edges, flash=flash, dtype=torch.float64)


def _options(change):
    """A fault in the keywords that `ring_attention` gets."""

    def plant(patch):
        right = beneath.ring_attention
        patch.setattr(beneath, "ring_attention", lambda *x, **named: right(*x, **change(named)))

    return plant


def _one_more(patch):
    """The first document has one more token."""
    right = beneath.offsets

    def wrong(x, name):
        return right(x, name) + (np.arange(len(x)) > 0) * ("padded" not in name)

    patch.setattr(beneath, "offsets", wrong)


def _first_group(patch):
    """The group of the first microbatch."""
    right, kept = beneath._Ring._group_of, []

    def wrong(ring, call):
        kept.append(right(ring, call))
        return kept[0]

    patch.setattr(beneath._Ring, "_group_of", wrong)


PLANTED = {
    "window": _options(lambda named: named | {"window_size": named["window_size"][::-1]}),
    "sink": _options(lambda named: named | {"sink": named["sink"].roll(1)}),
    "offset": _one_more,
}
SEEN = {
    "window": Call(causal=False, window=(3, 9)),
    "sink": Call(sink=True),
    "offset": replace(PACKED, ends=(20, 64)),
}


@pytest.mark.ci
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(pool, fault):
    assert not run(pool, [SEEN[fault]])[1]
    assert run(pool, [SEEN[fault]], fault=fault)[1]


PAIRS = ([0, 1], [2, 3]), ([0, 2], [1, 3])


def microbatches(group, planted):
    """A call with each of `PAIRS`, with the same offsets in all."""
    _groups(group, "a2a+p2p")
    with ring() as (package, patch):
        if planted:
            _first_group(patch)
        groups = [next(x for x in pair if dist.get_rank() in x) for pair in PAIRS]
        return [_attend(_made(ranks)[-1], PACKED, package, "2.20.2") for ranks in groups]


@pytest.mark.ci
@pytest.mark.parametrize("planted", [False, True])
def test_each_microbatch_may_have_a_group_of_its_own(pool, planted):
    first, second = zip(*pool.run(microbatches, 4, planted), strict=True)
    assert off(PACKED, first[:2]) < 1 and off(PACKED, first[2:]) < 1
    assert (off(PACKED, second[::2]) < 1) != planted


MOVED = replace(PACKED, edges=(0, 40, 64))


def passes(group):
    """How often offsets were read after each of some passes through three layers, and out and
    gradients of a pass after others wrote new offsets into the tensor.
    """
    reads, counts = [], []
    right = beneath.offsets
    q, k, v = parts_of(PACKED, group)
    with ring() as (package, patch):
        patch.setattr(beneath, "offsets", lambda *x: reads.append(x) or right(*x))

        def layer(q, number, given):
            return forward(package, q, k, v, layer_number=number, **given)

        def through(given):
            x = q.clone().requires_grad_()
            out = x
            for number in (4, 5, 6):
                out = out + checkpoint(layer, out, number, given, use_reentrant=False)
            counts.append(len(reads))
            out.sum().backward()
            counts.append(len(reads))

        given = arguments(PACKED, group)
        through(given)
        through(given)
        through(arguments(PACKED, group))
        # as a collective does, which leaves the version of a tensor as it was
        given["cu_seqlens"][0].data.copy_(torch.tensor(MOVED.edges))
        leaves = [x.requires_grad_() for x in parts_of(MOVED, group)]
        out = forward(package, *leaves, layer_number=4, **given)
        dout = shard(MOVED, MOVED.draw()[0].dout, dist.get_rank(group))
        grads = torch.autograd.grad(out, leaves, dout)
    return counts, [x[None] for x in (out.detach(), *grads)]


@pytest.mark.ci
def test_offsets_are_read_once_a_microbatch(pool):
    counts, parts = zip(*pool.run(passes, 2), strict=True)
    assert counts[0] == counts[1] == [1, 1, 2, 2, 3, 3]
    assert off(MOVED, parts) < 1


FEATURES = {
    "FP8 attention": {"fp8": True, "fp8_meta": {"recipe": SimpleNamespace(fp8_dpa=True)}},
    "biases": {"core_attention_bias_type": "post_scale_bias"},
    "dropout": {"dropout": 0.1},
    "attn_mask_type causal_bottom_right": {"attn_mask_type": "causal_bottom_right"},
    "padding masks": {"attn_mask_type": "padding_causal"},
    "largest logits": {"return_max_logit": True},
    "caches of keys": {"inference_params": object()},
    "softcap": {"softcap": 30.0},
    "score_mod": {"has_score_mod": True},
    "cross attention": {"keys": 4},
    "packed documents in CUDA graphs": {"cuda_graph": True},
}


def left(group, window, strict):
    """What each of `FEATURES` says and ends in."""
    ends = {}
    for name, feature in FEATURES.items():
        call = PACKED if "cuda_graph" in feature else Call()
        q, k, v = parts_of(call, group)
        given = {**arguments(call, group), "window_size": window, **feature}
        keys = given.pop("keys", None)
        parts = q, k[:keys], v[:keys]
        with (
            ring(strict=strict) as (package, patch),
            warnings.catch_warnings(record=True) as found,
        ):
            patch.setattr(beneath, "capturing", lambda _, name=name: "graph" in name.lower())
            warnings.simplefilter("always")
            for _ in range(2):
                try:
                    forward(package, *parts, **given)
                except Exception as error:
                    ends[name] = type(error).__name__, str(error)
        ends[name] += ([str(each.message) for each in found],)
    return ends


@pytest.mark.ci
@pytest.mark.parametrize("window", [(-1, 0), (5, 0)])
def test_what_the_ring_has_not_is_left_and_said_once(pool, window):
    """TransformerEngine then has its own choice of a backend, and not an error of its own."""
    for name, (kind, _, lines) in pool.run(left, 2, window, False)[0].items():
        assert kind == "ValueError" or (kind == "Left" and window == (-1, 0)), name
        assert len(lines) == 1 and f"no {name};" in lines[0]


@pytest.mark.ci
def test_strict_makes_it_an_error(pool):
    for name, (kind, line, warned) in pool.run(left, 2, (-1, 0), True)[0].items():
        assert kind == "ConfigError" and f"no {name};" in line and not warned


def test_another_signature_changes_nothing():
    for signature, words in (
        ({"more": ["cp_topology"]}, "has cp_topology"),
        ({"without": ["softmax_offset"]}, "lacks softmax_offset"),
    ):
        with installed("2.21.0", **signature) as package:
            stock = package.backends.attn_forward_func_with_cp
            with pytest.raises(ConfigError, match=f"^TransformerEngine 2.21.0: .*{words}"):
                use_ring()
            assert package.backends.attn_forward_func_with_cp is stock


def test_it_is_undone_and_is_there_once():
    with installed() as package:
        stock = package.backends.attn_forward_func_with_cp, package.utils.get_attention_backend
        undo = use_ring()
        assert package.dot_product_attention._attention_backends["attention_params"] is None
        assert "called before" in refused(ConfigError, use_ring, "a2a")
        undo()
        now = package.backends.attn_forward_func_with_cp, package.utils.get_attention_backend
        assert now == stock


def test_the_flag_puts_it_there_with_the_options_of_a_job(monkeypatch, applied):
    asked = []
    monkeypatch.setattr(beneath, "ring_attention", lambda *x, **named: asked.append(named))
    configure(Options(beneath="te", num_slots=3, kernel="reference", hop_timeout=7))
    with installed() as package:
        stock = package.backends.attn_forward_func_with_cp
        applied("beneath_te")
        x = torch.zeros(4, 1, 2, 8)
        first = True, x, x, x, None, None, 8, 8, None, None, 0.0, "group", [0], None, "a2a"
        package.backends.attn_forward_func_with_cp(*first, qkv_format="sbhd", window_size=(3, 0))
        patches.get("beneath_te").revert()
        assert package.backends.attn_forward_func_with_cp is stock
    wanted = {"num_slots": 3, "kernel": "reference", "timeout": 7, "window_size": (3, 0)}
    assert asked[0].items() >= wanted.items()


def test_wrong_arguments_have_a_line():
    assert "cp_comm_type='ring': known are p2p" in refused(ConfigError, use_ring, "ring")
    assert "no option layout" in refused(ConfigError, use_ring, layout="zigzag")
    assert "transformer_engine cannot be imported" in refused(ConfigError, use_ring)


WRONG_OFFSETS = {
    "document 0 has 25 tokens, padded to 24": ((0, 25, 64), (0, 24, 64)),
    "has 1 documents, cu_seqlens_q_padded 2": ((0, 64), (0, 24, 64)),
    "ends at 72, but 2 ranks hold 64 tokens": ((0, 24, 72), None),
    "document 0 has 22 tokens, not a multiple": ((0, 22, 64), None),
    "must start at 0 and not decrease": ((0, 40, 24), None),
}


def wrong_offsets(group):
    parts, lines = parts_of(PACKED, group), []
    with ring() as (package, _):
        for each in WRONG_OFFSETS.values():
            given = [None if x is None else torch.tensor(x, dtype=torch.int32) for x in each]
            more = arguments(PACKED, group) | {"cu_seqlens": given}
            lines.append(said(forward, package, *parts, **more))
    return lines


def test_wrong_offsets_have_a_line(pool):
    for line, words in zip(pool.run(wrong_offsets, 2)[0], WRONG_OFFSETS, strict=True):
        assert words in line


@pytest.mark.ci
def test_a_sample_is_right(pool):
    calls = [*[*of_table()][::31], *[*further()][::7]]
    counts, wrong = run(pool, calls)
    assert not wrong and counts == {"ring": len(calls)}


@pytest.mark.slow
@pytest.mark.parametrize("version", te_stand_in.LATER)
def test_all_cases_are_right(pool, version):
    calls = [*of_table(), *further()]
    counts, wrong = run(pool, calls, version=version)
    assert not wrong and counts == {"ring": len(calls)} and len(calls) > 700
