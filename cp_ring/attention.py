"""Attention: everything that does not change between calls is resolved and checked once; a call
only runs it.

Shapes: s tokens of this rank's shard, b batch, h query heads, g key/value heads, d head size of
queries and keys, e head size of values.

The way of a key from the caller to the kernel, one Python frame a line:

    ring_attention              makes or takes the plan (in Megatron: RingDotProductAttention)
    Attention.__call__          compares calls of ranks; exchanges heads
    RingAttention.forward       torch's autograd function; brings the tokens of keys first
    _run_forward                the hop loop; KeyStream hands it each hop's keys
    KernelCall.attend           cuts the call's queries and keys out of the buffers
    kernel.forward              the adapter of a kernel, at most three frames

Backward starts in `RingAttention.backward` and goes on through `_run_backward` and
`KernelCall.gradients`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from itertools import starmap

import torch
from torch import Tensor

from cp_ring.comm.codecs import CODECS
from cp_ring.comm.plain import Plain
from cp_ring.comm.transport import Transport
from cp_ring.errors import ConfigError, PlanError
from cp_ring.hop_loop import Ring, RingAttention, RingCall
from cp_ring.inputs import AttentionOptions, Inputs, KeptOutput, Output
from cp_ring.kernels import (
    REGISTRY,
    AttentionKernel,
    choose,
    determinism,
    deterministic,
    switched,
)
from cp_ring.kernels.base import MaxLogitKernel
from cp_ring.observe.watchdog import WATCH
from cp_ring.ops.dtypes import sum_dtype
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan
from cp_ring.plan.records import Fact, RankPlan
from cp_ring.plan.sizes.head_split import split_heads
from cp_ring.runtime import RUNTIME

AnyPlan = Plan | RankPlan

_OF_A_RANK = {"deterministic", "kernel", "lse", "max_logit", "qkv_format"}
"""Options that change no message. Ranks may give different ones; all others are compared."""

_MAX_KINDS = 64  # of calls of one plan
_MANY_HEADS = 128  # of a layer


_made: weakref.WeakKeyDictionary[AnyPlan, dict[object, Attention]] = RUNTIME.keep(
    weakref.WeakKeyDictionary()
)


def attention_of(
    plan: AnyPlan, transport: Transport | None, options: AttentionOptions, inputs: Inputs
) -> Attention:
    """Return the `Attention` of a plan for all inputs with the sizes, dtypes and device of `inputs`
    (`Inputs.kinds`). It is made once, and lives as long as the plan.
    """
    if not isinstance(plan, AnyPlan):
        kinds = ((Mask, "mask="), (Layout, "layout="), (object, "plan=Plan.build(mask, layout)"))
        hint = next(name for kind, name in kinds if isinstance(plan, kind))
        raise PlanError(f"plan is a {type(plan).__name__}, not a Plan: pass {hint}")
    of_plan = _made.setdefault(plan, {})
    exact = deterministic() if options.deterministic is None else options.deterministic
    # kernels read torch's own switch too
    key = id(transport), options, exact, switched(), tuple(REGISTRY.items()), inputs.kinds()
    attention = of_plan.get(key)
    if attention is None or attention.transport() is not transport:
        if len(of_plan) >= _MAX_KINDS:
            of_plan.clear()
        rank_plan = _rank_plan_of(plan, transport)
        attention = of_plan[key] = Attention(rank_plan, transport, options, inputs)
    return attention


def _rank_plan_of(plan: AnyPlan, transport: Transport | None) -> RankPlan:
    """Return the part of a plan that this rank of the transport runs. Raises `PlanError` if plan
    and transport do not fit together.
    """
    if transport is None and plan.cp > 1:
        raise PlanError(f"the plan is for {plan.cp} ranks: pass their process group as group=")
    if transport is not None and transport.size != plan.cp:
        raise PlanError(
            f"the plan is for {plan.cp} ranks, the group has {transport.size}: its layout must be "
            f"for {transport.size} ranks"
        )
    rank = transport.rank if transport else 0
    rank_plan = plan if isinstance(plan, RankPlan) else plan.proven_part(rank)
    if rank_plan.rank != rank:
        raise PlanError(
            f"plan is the part of rank {rank_plan.rank}, but this is rank {rank} of the group"
        )
    return rank_plan


class Attention:
    """Attention of one rank under one plan, for inputs of one kind. Its constructor settles
    everything that does not change between calls.

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
        q, k, v, sink, latents = inputs
        self._bshd = options.qkv_format == "bshd"
        inputs.check()
        first, second, h, d = q.shape
        batch, tokens = (first, second) if self._bshd else (second, first)
        self._plan, self._options = weakref.ref(rank_plan), options
        self.transport: Callable[[], Transport | None] = (
            weakref.ref(transport) if transport is not None else lambda: None
        )
        codec = _codec_for(options.wire, rank_plan, inputs)
        self._latents = codec.needs_latents
        with determinism(options.deterministic):
            exact = deterministic()
            self._kernel = choose(
                options.kernel,
                device=q.device,
                dtype=q.dtype,
                d=d,
                e=v.shape[-1],
                packed=rank_plan.packed,
                max_logit=options.max_logit,
            )
        if h > max(tokens, _MANY_HEADS):
            warnings.warn(
                f"q has {h} heads and {tokens} tokens: for tensors [batch, heads, tokens, "
                "head size] pass qkv_format='bhsd'",
                stacklevel=2,
            )
        # Batch rows with masks of their own are one stream of tokens.
        self._batch_rows = batch if rank_plan.batch == batch > 1 else 0
        _check_tokens(rank_plan, tokens * (self._batch_rows or 1))
        self._ring = Ring(
            codec=codec,
            bshd=self._bshd and rank_plan.exchange is None and not self._batch_rows,
            scale=d**-0.5 if options.softmax_scale is None else options.softmax_scale,
            num_slots=options.num_slots,
            wire_dtype={
                "input": q.dtype,
                "float32": sum_dtype(q.dtype),
                "bfloat16": torch.bfloat16,
            }[options.wire_dtype],
            exact=exact,
            shares_heads=not self._latents and h > k.shape[2],
        )
        compared = {name: x for name, x in vars(options).items() if name not in _OF_A_RANK}
        compared |= {
            "dtype": q.dtype,
            "batch": 1 if self._batch_rows else batch,
            "query heads": h,
            "key/value heads": k.shape[2],
            "head size": d,
            "head size of values": v.shape[3],
            "softmax_scale": self._ring.scale,
            "wire": Plain.name if rank_plan.cp == 1 else options.wire,
            "wire_dtype": self._ring.wire_dtype,
            # with heads exchanged, lse is one more tensor of the messages
            "return_lse": options.lse and rank_plan.exchange is not None,
            "sink": sink is not None,
            "sizes of latents": latents.sizes if latents and self._latents else (),
        }
        self._key = rank_plan.digest, *compared.values()
        self._facts = [*rank_plan.identity, *starmap(Fact.of, compared.items())]

    def __call__(self, inputs: Inputs, kept: KeptOutput | None = None) -> Output:
        """Return attention of this rank's queries to all keys. With `kept`, the result is that of
        the kept call, and nothing is computed in forward.
        """
        q, k, v, sink, latents = inputs
        more: Sequence[Tensor] = ()
        if latents and self._latents:
            more = latents._replace(latent=self._in_stream(latents.latent))
        if not self._ring.bshd:
            q, k, v = map(self._in_stream, (q, k, v))
        kernel, plan, transport = self._kernel_of_call(), self._plan(), self.transport()
        assert plan is not None, "an attention is called without its plan"
        transport = transport if plan.cp > 1 else None
        agree = getattr(transport, "agree", None)
        # Raises `PlanError` on all ranks where the ranks of the transport make different calls.
        begin_backward = agree and agree(
            self._key, lambda: self._facts, self._options.compare_every
        )
        place = WATCH.place if kept is None else kept.place
        call = RingCall(self._ring, plan, transport, kernel, place, begin_backward)
        if plan.exchange is None:
            out, lse = RingAttention.apply(call, kept and kept.parts[0], q, k, v, sink, *more)
            output = Output(out, lse, getattr(kernel, "max_logit", None), [(out, lse)])
        else:
            output = self._over_heads(call, kept, q, k, v, sink)
        out, lse, *_ = output
        if rows := self._batch_rows:
            out = out[:, 0].unflatten(0, (rows, -1)).transpose(0, 1)
            lse = None if lse is None else lse[0].unflatten(1, (rows, -1)).transpose(0, 1)
        if self._bshd and not self._ring.bshd:
            out = out.transpose(0, 1)
        return output._replace(out=out, lse=lse)

    def _in_stream(self, x: Tensor) -> Tensor:
        """Return a tensor of the caller's format with tokens first, [s, b, ...]. Batch rows with
        masks of their own follow one another, [b * s, 1, ...].
        """
        if self._batch_rows:
            return (x if self._bshd else x.transpose(0, 1)).flatten(0, 1)[:, None]
        return x.transpose(0, 1) if self._bshd else x

    def _over_heads(
        self,
        call: RingCall,
        kept: KeptOutput | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
    ) -> Output:
        """Run attention over the ring for this rank's heads, one group after another, with the
        exchange of heads around it.
        """
        from cp_ring.comm.heads import over_heads, sub_transports
        from cp_ring.comm.mover import Mover

        plan, whole = call.rank_plan, call.transport
        assert plan.exchange is not None and whole is not None, "heads are exchanged by one rank"
        neighbors, ring = sub_transports(whole, plan.ulysses)
        split = split_heads(q.shape[2], k.shape[2], plan.ulysses)
        parts = list[tuple[Tensor, Tensor]]()
        max_logit = None
        if self._options.max_logit:
            max_logit = q.new_full(q.shape[2:3], -torch.inf, dtype=torch.float32)
        mover = Mover(plan.exchange, neighbors)

        def attention(
            q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, group: int
        ) -> tuple[Tensor, Tensor]:
            kernel = self._kernel_of_call()
            mine = call._replace(kernel=kernel, transport=ring, begin_backward=None)
            parts.append(RingAttention.apply(mine, kept and kept.parts[group], q, k, v, sink))
            found = getattr(kernel, "max_logit", None)
            if max_logit is not None and found is not None:
                max_logit[slice(*split.queries[group][mover.rank])] = found
            return parts[-1]

        out, lse = over_heads(
            mover, split, q, k, v, sink, attention, self._options.lse, call.start_backward
        )
        return Output(out, lse, max_logit, parts)

    def _kernel_of_call(self) -> AttentionKernel:
        """Return the kernel; if the largest logits are wanted, one for one call, which keeps them
        as `max_logit`.
        """
        if not self._options.max_logit:
            return self._kernel
        assert isinstance(self._kernel, MaxLogitKernel), "a kernel was chosen for what it lacks"
        return self._kernel.with_max_logit()


def _codec_for(wire: str, rank_plan: RankPlan, inputs: Inputs) -> type[Plain]:
    """Return the codec of a call, `Plain` if nothing travels around the ring. Raises `ConfigError`
    if the call's codec does not support its inputs or plan.
    """
    if wire in CODECS:
        codec = CODECS[wire]
    else:
        from cp_ring.comm.latent import LatentCodec as codec
    if codec.needs_latents and inputs.latents is None:
        raise ConfigError(f"wire={wire!r} needs LatentKeys in place of k")
    if codec.needs_latents and rank_plan.exchange:
        raise ConfigError(
            f"wire={wire!r} does not support heads={rank_plan.ulysses}: the MLA latent has no head "
            "dimension to split"
        )
    return Plain if rank_plan.cp == rank_plan.ulysses else codec


def _check_tokens(rank_plan: RankPlan, tokens: int) -> None:
    """Raise `PlanError` if a rank has another number of tokens than its plan. Batch rows with masks
    of their own count together.
    """
    wanted, count = rank_plan.shard_tokens, rank_plan.batch
    if tokens != wanted:
        batches = f" ({count} batch rows of {wanted // count})" if count > 1 else ""
        raise PlanError(
            f"rank {rank_plan.rank} holds {wanted} tokens of the layout{batches}, but q, k and v "
            f"have {tokens}"
        )
