"""Attention: what does not change between calls is resolved and checked once; a call only runs it.

Shapes: s tokens of this rank's shard, b batch, h query heads, g key/value heads, d head size of
queries and keys, e head size of
values.

The way of a key from the caller to the kernel, one Python frame a line:

    ring_attention              makes or takes the plan (in Megatron: RingDotProductAttention)
    Attention.__call__          brings tokens first; exchanges heads
    RingAttention.forward       torch's autograd function
    _run_forward                the hop loop; KeyStream hands it each hop's keys
    KernelCall.attend           cuts the call's queries and keys out of the buffers
    kernel.forward              the adapter of a kernel, at most three frames

Backward starts in `RingAttention.backward` and goes on through `_run_backward` and
`KernelCall.gradients`.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cp_ring.comm.agreement import EVERY, Fact, some_of
from cp_ring.comm.codecs import CODECS, Codec, Plain
from cp_ring.comm.transport import Group, Transport, rank_in_job, transport_for
from cp_ring.errors import ConfigError, PlanError, expect
from cp_ring.hop_loop import Ring, RingAttention, RingCall
from cp_ring.kernels import REGISTRY, AttentionKernel, Extras, choose, determinism, deterministic
from cp_ring.observe.timing import note_rank
from cp_ring.observe.watchdog import WATCH, Place
from cp_ring.ops.dtypes import in_one_dtype, sum_dtype
from cp_ring.options import SETTINGS, Options, choices, either
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan
from cp_ring.plan.sizes.attention_sizes import WIRES
from cp_ring.plan.sizes.head_split import split_heads
from cp_ring.plan.tables import RankPlan
from cp_ring.runtime import RUNTIME

if TYPE_CHECKING:
    from cp_ring.comm.latent import Latents
    from cp_ring.kernels.dropout import Dropout
    from cp_ring.kernels.logits import LogitKernel
    from cp_ring.offload import Offload, Waiting

AnyPlan = Plan | RankPlan

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_KINDS = 64  # of calls of one plan
_MANY_HEADS = 128  # of a layer


@dataclass(frozen=True)
class AttentionOptions:
    """What calls have in common beside their plan and group; see `ring_attention` for those that it
    has too.

    lse: `Output.lse` is wanted. max_logit: `Output.max_logit` is.
    compare_every: `every` of `Agreement.check`.

    Raises `ConfigError` for a value that no call can have.
    """

    softmax_scale: float | None = None
    softcap: float = 0.0
    deterministic: bool | None = None
    kernel: str = Options.kernel
    num_slots: int = Options.num_slots
    compute_streams: int = Options.compute_streams
    wire: str = "plain"
    wire_dtype: str = Options.wire_dtype
    qkv_format: str = "bshd"
    lse: bool = False
    max_logit: bool = False
    compare_every: int = EVERY

    def __post_init__(self) -> None:
        expect("softmax_scale", self.softmax_scale, Real, NoneType)
        expect("softcap", self.softcap, Real)
        expect("deterministic", self.deterministic, bool, NoneType)
        expect("return_lse", self.lse, bool)
        for name in ("num_slots", "compute_streams"):
            value = getattr(self, name)
            least, most = (SETTINGS[name].metadata[end] for end in ("least", "most"))
            if not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(
                    f"{name}={value!r}: it must be a whole number from {least} to {most}"
                )
        if self.wire not in WIRES:
            raise ConfigError(f"wire={self.wire!r}: known are {', '.join(WIRES)}")
        if self.wire_dtype not in (dtypes := choices("wire_dtype")):
            raise ConfigError(f"wire_dtype={self.wire_dtype!r}: it must be {either(dtypes)}")
        if self.qkv_format not in ("bshd", "sbhd"):
            raise ConfigError(f"qkv_format={self.qkv_format!r}: it must be bshd, sbhd, bhsd or thd")
        if self.softmax_scale is not None and not 0 < self.softmax_scale < math.inf:
            raise ConfigError(
                f"softmax_scale={self.softmax_scale}: it must be a finite number above 0"
            )
        if not 0 <= self.softcap < math.inf:
            raise ConfigError(
                f"softcap={self.softcap}: it must be a finite number above 0, or 0 for none"
            )


class Inputs(NamedTuple):
    """What a call gets: q [b, s, h, d], k [b, s, g, d] and v [b, s, g, e], or tokens first as
    `qkv_format` says; sink [h].

    latents: what k and v were made from, and what travels with `wire="latent"`. dropout: dropout
    and ALiBi by positions.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    latents: Latents | None = None
    dropout: Dropout | None = None

    def alike(self) -> Inputs:
        """Under `torch.autocast`, tensors of different dtypes in one."""
        q, k, v, *more = in_one_dtype(self.q, self.k, self.v, *(self.latents or ()))
        latents = None if self.latents is None else type(self.latents)(*more)
        return Inputs(q, k, v, self.sink, latents, self.dropout)

    def kinds(self) -> tuple[object, ...]:
        """All that an `Attention` depends on, without the values of the tensors."""
        tensors = (self.q, self.k, self.v, self.sink, *(self.latents or ()))
        return self.dropout is None, *(
            x is not None and (type(x), x.shape, x.dtype, x.device) for x in tensors
        )

    def check(self, own_keys: bool, tokens: int) -> None:
        """Raises `PlanError` for tensors that do not fit together. own_keys: keys are not those of
        the queries' tokens. tokens: their dimension.
        """
        q, k, v = self[:3]
        sink = self.sink
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
            raise PlanError(
                "q, k and v must have 4 dimensions, batch, tokens, heads and head size; here "
                f"{shapes}"
            )
        if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
            dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
            raise PlanError(
                f"q, k and v must share one floating-point dtype of 16 to 64 bits; here {dtypes}"
            )
        if not q.device == k.device == v.device:
            raise PlanError(
                f"q, k and v must be on one device; here {q.device}, {k.device}, {v.device}"
            )
        if 0 in (*q.shape[2:], *k.shape[2:], v.shape[3]):
            raise PlanError(f"q, k and v need at least one head, of size at least 1; here {shapes}")
        if (
            k.shape[:3] != v.shape[:3]
            or k.shape[1 - tokens] != q.shape[1 - tokens]
            or not (own_keys or k.shape[tokens] == q.shape[tokens])
            or q.shape[3] != k.shape[3]
            or q.shape[2] % k.shape[2]
        ):
            raise PlanError(
                "batch sizes and tokens must agree, q and k must share a head size, key/value "
                f"heads must divide query heads; here {shapes}"
            )
        if sink is not None and (
            sink.shape != q.shape[2:3] or not sink.is_floating_point() or sink.device != q.device
        ):
            raise PlanError(
                f"sink must hold one number for each of {q.shape[2]} query heads on {q.device}, "
                f"not {tuple(sink.shape)} of {sink.dtype} on {sink.device}"
            )


class Output(NamedTuple):
    """Out [b, s, h, e] in the dtype of q and in its format; lse [b, h, s], None where it was to be
    sent and is not wanted.

    max_logit: the largest logit of each query head in the tiles of this rank, float32 [h], where
        they were computed; with the exchange of heads, -inf for the heads of other ranks. None if
        it is not wanted.
    parts: out and lse of the rings of each group of heads, before their exchange: what a
    recomputation needs.
    """

    out: Tensor
    lse: Tensor | None
    max_logit: Tensor | None
    parts: Sequence[tuple[Tensor, Tensor]]


class KeptOutput(NamedTuple):
    """`Output.parts` of a call, kept for its recomputation, and the place of that call, which is
    also that of the second one.

    A later call with the same inputs on every rank takes out and lse from it instead of computing
    and sending; its backward is the usual one.
    """

    parts: Sequence[tuple[Tensor | Waiting, ...]]
    place: Place

    @classmethod
    def of(cls, output: Output, offload: Offload | None = None) -> KeptOutput:
        """What is kept of an output. With `offload` it waits in host memory."""
        # Copies: the caller owns the tensors of the first run and may change them in place.
        copies = [tuple(x.detach().clone() for x in part) for part in output.parts]
        return cls(
            [part if offload is None else offload.put(*part) for part in copies], WATCH.place
        )

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(x.nbytes for part in self.parts for x in part)


_made: weakref.WeakKeyDictionary[RankPlan, dict[object, Attention]] = RUNTIME.keep(
    weakref.WeakKeyDictionary()
)


def attention_of(
    plan: AnyPlan, group: Group, options: AttentionOptions, inputs: Inputs
) -> Attention:
    """The attention of a plan for such inputs, which are `alike`; made once, it lives as long as
    this rank's part of the plan.
    """
    transport = transport_for(group, inputs.q.device)
    rank_plan = rank_plan_of(plan, transport)
    made = _made.setdefault(rank_plan, {})
    exact = deterministic() if options.deterministic is None else options.deterministic
    key = id(transport), options, exact, tuple(REGISTRY.items()), inputs.kinds()
    found = made.get(key)
    if found is None or found.transport() is not transport:
        if len(made) >= _MAX_KINDS:
            made.clear()
        found = made[key] = Attention(rank_plan, transport, options, inputs)
    return found


def codec_of(wire: str) -> type[Codec]:
    """The class of the codec of that name."""
    if wire in CODECS:
        return CODECS[wire]
    from cp_ring.comm.latent import LatentCodec

    return LatentCodec


def rank_plan_of(plan: AnyPlan, transport: Transport | None) -> RankPlan:
    """The part of a plan that this rank of the transport runs. Raises `PlanError` where the two do
    not fit together.
    """
    if not isinstance(plan, AnyPlan):
        hint = (
            "mask="
            if isinstance(plan, Mask)
            else "layout="
            if isinstance(plan, Layout)
            else "plan=Plan.build(mask, layout)"
        )
        raise PlanError(f"plan is a {type(plan).__name__}, not a Plan: pass {hint}")
    if transport is None and plan.cp > 1:
        raise PlanError(f"the plan is for {plan.cp} ranks: pass their process group as group=")
    if transport is not None and transport.size != plan.cp:
        raise PlanError(f"the plan is for {plan.cp} ranks, the group has {transport.size}")
    rank = transport.rank if transport else 0
    rank_plan = plan if isinstance(plan, RankPlan) else plan.rank_plan(rank)
    if rank_plan.rank != rank:
        raise PlanError(
            f"plan is the part of rank {rank_plan.rank}, but this is rank {rank} of the group"
        )
    return rank_plan


class Attention:
    """Attention of one rank under one plan, for inputs of one kind: what does not change between
    calls is settled here.

    It keeps neither its plan nor its transport alive. Raises `ConfigError`, `PlanError` or
    `KernelError` for inputs that do not fit.
    """

    def __init__(
        self,
        rank_plan: RankPlan,
        transport: Transport | None,
        options: AttentionOptions,
        inputs: Inputs,
    ):
        q, k, v, sink, latents, dropout = inputs
        self._bshd = options.qkv_format == "bshd"
        inputs.check(rank_plan.keys is not None, int(self._bshd))
        self._plan, self._options = weakref.ref(rank_plan), options
        self.transport: Callable[[], Transport | None] = (
            weakref.ref(transport) if transport is not None else lambda: None
        )
        split, alone = rank_plan.exchange, rank_plan.cp == 1
        codec = codec_of(options.wire)
        if codec.needs_latents and latents is None:
            raise ConfigError(f"wire={options.wire!r} needs LatentKeys in place of k")
        if codec.needs_latents and split:
            raise ConfigError(
                f"wire={options.wire!r} does not support heads={rank_plan.ulysses}: the MLA "
                "latent has no head dimension to split"
            )
        self._latents = codec.needs_latents and not alone
        with determinism(options.deterministic) as exact:
            self._kernel: AttentionKernel = choose(
                options.kernel,
                device=q.device,
                dtype=q.dtype,
                d=q.shape[-1],
                e=v.shape[-1],
                packed=rank_plan.packed,
                extras=Extras(dropout is not None, options.softcap),
            )
        if dropout is not None and not codec.carries_positions:
            others = "alibi_slopes" if dropout.bias is None else "bias"
            asked = f"dropout_p={dropout.p:g}" if dropout.p else others
            raise ConfigError(
                f"wire={options.wire!r} does not support {asked}, for which positions travel with "
                "the keys"
            )
        batch, tokens = q.shape[:2] if self._bshd else (q.shape[1], q.shape[0])
        if q.shape[2] > max(tokens, _MANY_HEADS):
            warnings.warn(
                f"q has {q.shape[2]} heads and {tokens} tokens: for tensors [batch, heads, tokens, "
                "head size] pass qkv_format='bhsd'",
                stacklevel=2,
            )
        # Batch rows with masks of their own are one stream of tokens.
        self._batch_rows = batch if rank_plan.batch == batch > 1 else 0
        for wanted, has, names, of in (
            (rank_plan.shard_tokens, tokens, "q, k and v have", "layout"),
            (rank_plan.shard_keys, k.shape[int(self._bshd)], "k and v have", "key_layout"),
        ):
            held, count = has * (self._batch_rows or 1), rank_plan.batch
            if held != wanted:
                batches = f" ({count} batch rows of {wanted // count})" if count > 1 else ""
                names = names if rank_plan.keys is None or of == "key_layout" else "q has"
                raise PlanError(
                    f"rank {rank_plan.rank} holds {wanted} tokens of the {of}{batches}, but "
                    f"{names} {held}"
                )
        self._ring = Ring(
            codec=Plain if rank_plan.cp == rank_plan.ulysses else codec,
            scale=q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale,
            num_slots=options.num_slots,
            compute_streams=options.compute_streams,
            wire_dtype={
                "input": q.dtype,
                "float32": sum_dtype(q.dtype),
                "bfloat16": torch.bfloat16,
            }[options.wire_dtype],
            exact=exact,
            rank=rank_in_job(transport),
        )
        self._identity, b = rank_plan.identity, 1 if self._batch_rows else batch
        self._facts = {
            "dtype": q.dtype, "batch": b, "query heads": q.shape[2], "key/value heads": k.shape[2],
            "head size": q.shape[3] + (dropout.columns if dropout else 0),
            "head size of values": v.shape[3],
            "softmax_scale": self._ring.scale, "softcap": options.softcap,
            "wire": Plain.name if alone else options.wire, "wire_dtype": self._ring.wire_dtype,
            "sink": sink is not None,
            "sizes of latents": latents.sizes if latents and self._latents else (),
        }  # fmt: skip
        self._key = rank_plan.digest, *self._facts.values()

    def __call__(self, inputs: Inputs, kept: KeptOutput | None = None) -> Output:
        """Attention of this rank's queries to all keys; with `kept`, that of the call kept."""
        q, k, v, sink, latents, dropout = inputs
        more = list(latents) if latents and self._latents else []
        if self._bshd:
            q, k, v, *more[:1] = (x.transpose(0, 1) for x in (q, k, v, *more[:1]))
        kernel, plan, transport = self._kernel, self._plan(), self.transport()
        assert plan is not None, "an attention is called without its plan"
        transport = transport if plan.cp > 1 else None
        if dropout is not None:
            (q, k), kernel = dropout.mark(q, k), dropout.kernel(kernel)
        logits: LogitKernel | None = None
        if self._options.max_logit:
            from cp_ring.kernels.logits import LogitKernel

            kernel = logits = LogitKernel(kernel, 0 if dropout is None else dropout.columns)
        if self._batch_rows:
            q, k, v, *more[:1] = (
                x.transpose(0, 1).flatten(0, 1)[:, None] for x in (q, k, v, *more[:1])
            )
        if (agree := getattr(transport, "agree", None)) is not None:
            # Raises `PlanError` on all ranks where the ranks of the transport make different calls.
            p, seed, slopes = (
                (0.0, 0, ()) if dropout is None else (dropout.p, dropout.key, dropout.slopes)
            )
            agree(
                (*self._key, p, slopes),
                partial(self._all_facts, p, seed, slopes),
                self._options.compare_every,
                partial(some_of, inputs.k if plan.replicated else inputs.q),
            )
        call = RingCall(
            self._ring, plan, transport, kernel, WATCH.place if kept is None else kept.place
        )
        lse: Tensor | None
        if plan.exchange is None:
            out, lse = RingAttention.apply(call, _taken(kept, 0), q, k, v, sink, *more)
            parts = [(out, lse)]
        else:
            out, lse, parts = self._over_heads(call, kept, q, k, v, sink, logits)
        if self._batch_rows:
            out = out[:, 0].unflatten(0, (self._batch_rows, -1)).transpose(0, 1)
            lse = (
                None if lse is None else lse[0].unflatten(1, (self._batch_rows, -1)).transpose(0, 1)
            )
        largest = None if logits is None else logits.largest
        return Output(out.transpose(0, 1) if self._bshd else out, lse, largest, parts)

    def kept(self, out: Tensor, lse: Tensor) -> KeptOutput | None:
        """What was kept of a call with these results; None where that takes more than these."""
        plan = self._plan()
        if plan is None or plan.exchange is not None or self._batch_rows:
            return None
        return KeptOutput([(out.transpose(0, 1) if self._bshd else out, lse)], WATCH.place)

    def _over_heads(
        self,
        call: RingCall,
        kept: KeptOutput | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        logits: LogitKernel | None,
    ) -> tuple[Tensor, Tensor | None, list[tuple[Tensor, Tensor]]]:
        """Attention over the ring for this rank's heads, one group of them after another, with
        their exchange around it.
        """
        from cp_ring.comm.heads import HeadExchange, over_heads, sub_transports

        plan, whole = call.rank_plan, call.transport
        assert plan.exchange is not None and whole is not None, "heads are exchanged by one rank"
        note_rank(self._ring.rank, q.device)
        neighbors, ring = sub_transports(whole, plan.ulysses)
        split, parts = (
            split_heads(q.shape[2], k.shape[2], plan.ulysses),
            list[tuple[Tensor, Tensor]](),
        )
        exchange = HeadExchange(neighbors, (plan.exchange, plan.key_exchange), split)

        def attention(
            q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, group: int
        ) -> tuple[Tensor, Tensor]:
            own = None if logits is None else logits.anew()
            mine = call._replace(kernel=own or call.kernel, transport=ring)
            parts.append(RingAttention.apply(mine, _taken(kept, group), q, k, v, sink))
            if logits is not None and own is not None:
                logits.add(own, split.queries[group][exchange.place][0], split.heads)
            return parts[-1]

        return *over_heads(exchange, q, k, v, sink, attention, self._options.lse), parts

    def _all_facts(self, p: float, seed: int, slopes: tuple[float, ...]) -> list[Fact]:
        named: dict[str, Any] = {
            "dropout_seed": seed,
            **self._facts,
            "dropout_p": p,
            "alibi_slopes": slopes,
        }
        return [
            *(Fact(*part) for part in self._identity),
            *(Fact.of(name, value) for name, value in named.items()),
        ]


def _taken(kept: KeptOutput | None, group: int) -> tuple[Tensor, ...] | None:
    if kept is None:
        return None
    from cp_ring.offload import tensor_of

    return tuple(map(tensor_of, kept.parts[group]))
