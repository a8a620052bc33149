"""cp_ring's ring beneath TransformerEngine's own context parallelism.

    undo = use_ring()  # before the first step

All attention of TransformerEngine over several ranks, that of derived classes too, goes through one
of its functions, `attn_forward_func_with_cp`. `use_ring` puts the ring in its place; classes,
checkpoints and recipes stay as they are.

Shapes: b batch rows; s tokens of this rank, t packed ones; h query and g key/value heads of sizes d
and e.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_ring.api import ring_attention
from cp_ring.errors import ConfigError
from cp_ring.ops.capture import capturing
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints, check_all, offsets

_OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_READ = {
    *_OFFSETS, "q", "k", "v", "dropout_p", "cp_group", "cp_global_ranks", "cp_comm_type",
    "softmax_scale", "qkv_format", "attn_mask_type", "attn_bias_type", "deterministic",
    "window_size", "fp8", "softmax_type", "softmax_offset", "layer_number", "return_max_logit",
    "max_seqlen_q", "max_seqlen_kv",
}  # fmt: skip
_NOT_READ = {
    "is_training", "cp_stream", "attn_bias", "use_fused_attention", "fp8_meta", "quantizers",
    "pad_between_seqs", "use_flash_attn_3", "fp8_output",
}  # fmt: skip
_LATER = {"softcap": 0.0, "use_flash_attn_4": False, "load_balancing_strategy": None}
"""Parameters that later versions add to `attn_forward_func_with_cp`."""

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
_OPTIONS = ("route", "schedule", "kernel", "num_slots", "wire", "wire_dtype", "timeout")
"""Keywords of `ring_attention` that the arguments of TransformerEngine do not settle."""


def use_ring(
    cp_comm_type: str | Sequence[str] = "p2p", *, strict: bool = False, **options: Any
) -> Callable[[], None]:
    """Let the ring run TransformerEngine's attention over several ranks; return a function that
    undoes it.

        undo = use_ring("p2p")

    Args:
        cp_comm_type: the ring runs the layers with this `cp_comm_type`: `p2p`, `all_gather`, `a2a`,
            `a2a+p2p`, or several of them. With `a2a+p2p` the ranks of the first group exchange
            heads.
        strict: True makes it an error where the ring would leave a call to TransformerEngine.
        options: `route`, `schedule`, `kernel`, `num_slots`, `wire`, `wire_dtype` and `timeout` of
            `cp_ring.ring_attention`.

    Tensors are TransformerEngine's: q [b, s, h, d], k [b, s, g, d] and v [b, s, g, e], or tokens
    first, or [t, heads, size] for packed documents; float16, bfloat16, float32 or float64. Their
    split is TransformerEngine's too: zigzag, for packed documents within each padded one. Padding
    has out 0. Windows and learned sinks need no `a2a`, and heads no multiple of the ranks. FP8
    attention, biases, dropout, bottom-right masks, cross attention, padding masks and others are
    left to TransformerEngine; a warning names each reason once.

    Offsets of documents are read from the device in the first of consecutive layers
    (`layer_number`), once a microbatch.

    Raises `ConfigError` if TransformerEngine is not installed or has another function than this was
    written for, if the ring is there already, and for unknown arguments. In a call, `PlanError` or
    `ConfigError` for offsets that contradict each other or the tensors.

    Source: `attn_forward_func_with_cp` and `get_attention_backend` of TransformerEngine 2.14 to
    2.20, https://github.com/NVIDIA/TransformerEngine.
    """
    comm_types = {cp_comm_type} if isinstance(cp_comm_type, str) else set(cp_comm_type)
    for name in comm_types.difference(COMM_TYPES):
        raise ConfigError(f"cp_comm_type={name!r}: known are {', '.join(COMM_TYPES)}")
    for name in options.keys() - set(_OPTIONS):
        known = ", ".join(_OPTIONS)
        raise ConfigError(f"use_ring() has no option {name}: known are {known}")
    try:
        from transformer_engine.pytorch.attention.dot_product_attention import (
            backends,
            dot_product_attention,
            utils,
        )
    except ImportError as error:
        raise ConfigError(f"transformer_engine cannot be imported: {error}") from None
    attend, select = backends.attn_forward_func_with_cp, utils.get_attention_backend
    if isinstance(getattr(attend, "__self__", None), _Ring):
        raise ConfigError("use_ring() was called before: undo that first, by what it returned")
    _check_signature(attend)
    ring = _Ring(attend, select, comm_types, strict, options)

    def put(attend: Callable[..., Any], select: Callable[..., Any]) -> None:
        backends.attn_forward_func_with_cp, utils.get_attention_backend = attend, select
        # the choice of a backend is kept from call to call
        dot_product_attention._attention_backends["attention_params"] = None

    put(ring.attend, ring.select)
    return lambda: put(attend, select)


def _check_signature(function: Callable[..., Any]) -> None:
    """Raise `ConfigError` with the difference if the function has not the known parameters."""
    import transformer_engine

    found, known = set(inspect.signature(function).parameters), _READ | _NOT_READ
    more, fewer = sorted(found - known - set(_LATER)), sorted(known - found)
    words = [f"has {', '.join(more)}"] * bool(more) + [f"lacks {', '.join(fewer)}"] * bool(fewer)
    if words:
        raise ConfigError(
            f"TransformerEngine {transformer_engine.__version__}: attn_forward_func_with_cp "
            f"{' and '.join(words)}, other than in 2.14 to 2.20; the ring is not put beneath it"
        )


class _Ring:
    """What stands in the place of TransformerEngine's functions `attend` and `select`."""

    def __init__(
        self,
        attend: Callable[..., Any],
        select: Callable[..., Any],
        comm_types: set[str],
        strict: bool,
        options: dict[str, Any],
    ):
        self._attend, self._select = attend, select
        self._comm_types, self._strict, self._options = comm_types, strict, options
        parameters = inspect.signature(attend).parameters
        self._names = tuple(parameters)
        self._defaults = _LATER | {name: x.default for name, x in parameters.items()}
        self._said: set[str] = set()
        self._documents = WeakTensorKeyDictionary()
        self._groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def attend(self, *given: Any, **named: Any) -> Any:
        """`attn_forward_func_with_cp`: return out, in the format of q with the head size of v."""
        values = self._defaults | dict(zip(self._names, given, strict=False)) | named
        call = SimpleNamespace(**values)
        if call.cp_comm_type not in self._comm_types:
            return self._attend(*given, **named)
        packed = call.qkv_format == "thd"
        split = getattr(call.load_balancing_strategy, "name", "DUAL_CHUNK_SWAP")
        reason = _reason(
            call.attn_mask_type,
            packed,
            call.max_seqlen_q != call.max_seqlen_kv,
            {
                "FP8 attention": call.fp8,
                "biases": call.attn_bias_type != "no_bias",
                "dropout": call.dropout_p,
                "softcap": call.softcap,
                "largest logits": call.return_max_logit,
                f"load balancing {split}": split != "DUAL_CHUNK_SWAP",
                _GRAPHS: packed and capturing(call.q.device),
            },
        )
        group, heads = (None, {}) if reason else self._group_of(call)
        if group is None:
            reason = reason or "use for two groups without one of all ranks"
        elif packed and not (documents := self._documents_of(call)).same:
            reason = _CROSS
        if reason:
            self._fall_through(reason)
            return self._attend(*given, **named)
        causal, (left, right) = "causal" in call.attn_mask_type, call.window_size or (-1, -1)
        window = left, 0 if causal else right
        asked: dict[str, Any] = {"causal": causal, "window_size": window}
        if packed:
            asked = documents.split(len(call.q), dist.get_world_size(group), causal, window)
        sink = None if call.softmax_type == "vanilla" else call.softmax_offset.reshape(-1)
        asked |= {
            "qkv_format": call.qkv_format,
            "softmax_scale": call.softmax_scale,
            "deterministic": call.deterministic or None,
            "sink": sink,
        }
        return ring_attention(call.q, call.k, call.v, group, **{**asked, **heads, **self._options})

    def select(self, params: Any) -> Any:
        """`get_attention_backend`: for calls that the ring runs, windows, sinks and numbers of
        heads are no reason against a backend.
        """
        if not params.context_parallel or params.cp_comm_type not in self._comm_types:
            return self._select(params)
        packed, mask = "thd" in params.qkv_layout, params.attn_mask_type
        fp8 = params.fp8 and params.fp8_meta["recipe"].fp8_dpa
        reason = _reason(
            mask,
            packed,
            params.max_seqlen_q != params.max_seqlen_kv,
            {
                "FP8 attention": fp8 or params.qkv_type is not Tensor,
                "biases": params.core_attention_bias_type != "no_bias",
                "dropout": params.attention_dropout and params.is_training,
                "softcap": getattr(params, "softcap", 0),
                "score_mod": getattr(params, "has_score_mod", False),
                "largest logits": params.return_max_logit,
                "caches of keys": params.inference_params is not None,
                _GRAPHS: packed and params.cuda_graph,
            },
        )
        if reason:
            self._fall_through(reason)
            return self._select(params)
        lifted = {
            "window_size": (-1, 0 if "causal" in mask else -1),
            "softmax_type": "vanilla",
            "cp_comm_type": "p2p",
            "cp_size_a2a": 1,
        }
        names = {field.name for field in fields(params)}
        found = self._select(replace(params, **{x: lifted[x] for x in names & lifted.keys()}))
        *_, backend, _, available = found
        flash, fused, _ = available
        if fused:  # the only one that hands over sinks and layer numbers
            return False, None, True, backend, False, available
        return found if flash and params.softmax_type == "vanilla" else self._select(params)

    def _fall_through(self, reason: str) -> None:
        line = f"cp_ring's ring has no {reason}; it is left to TransformerEngine's own"
        if self._strict:
            raise ConfigError(line)
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(line, stacklevel=3)

    def _group_of(self, call: Any) -> tuple[Any, dict[str, int]]:
        """Return the group of all ranks of a call, and `heads` for the ring if it has two groups.
        These are neighbors, and a ring across them; None if they are not, or if the job has no
        group of all.
        """
        if not isinstance(call.cp_group, list):
            return call.cp_group, {}
        near, far = call.cp_group
        size, ranks = near.size(), list(call.cp_global_ranks)
        first = far.rank() * size
        if ranks[first : first + size] != dist.get_process_group_ranks(near):
            return None, {}
        if far not in self._groups:
            # Not a group of its own: its communicator and the others would wait for one another.
            world: Any = dist.distributed_c10d._world
            self._groups[far] = next(
                (
                    group
                    for group, places in world.pg_group_ranks.items()
                    if list(places) == ranks and dist.get_backend(group) == dist.get_backend(far)
                ),
                None,
            )
        g = call.k.shape[-2]
        fits = call.q.shape[-2] % size == 0 and (g % size == 0 or size % g == 0)
        return self._groups[far], {"heads": size} if fits else {}

    def _documents_of(self, call: Any) -> _Documents:
        """Return the documents of a call. Whoever writes new offsets into a tensor leaves no trace,
        so it is read again unless the layer before this one had it, or this is a recomputation.
        """
        tensors = [getattr(call, name) for name in _OFFSETS]
        layer, recomputes = call.layer_number or 0, torch._C._current_graph_task_id() != -1
        found = self._documents.get(tensors[0])
        if found is None or not found.made_of(tensors) or not (recomputes or layer == found.layer):
            found = self._documents[tensors[0]] = _Documents(tensors)
        if not recomputes:
            found.layer = layer + 1
        return found


_CROSS = "cross attention"
_GRAPHS = "packed documents in CUDA graphs"


def _reason(mask: str, packed: bool, cross: bool, asked: dict[str, object]) -> str:
    """Return the first that a call asks of what the ring has not; "" if the ring runs it."""
    other = mask not in ("no_mask", "causal", "padding", "padding_causal")
    asked |= {
        f"attn_mask_type {mask}": other,
        "padding masks": "padding" in mask and not packed,
        _CROSS: cross,
    }
    return next((name for name, there in asked.items() if there), "")


class _Documents:
    """The documents of a microbatch: the values of its offsets, and what is made of them.

    same: False for cross attention. layer: the number of the next layer of the pass.
    """

    layer = 0

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = [weakref.ref(x) for x in tensors]
        distinct = {id(x): (x, name) for x, name in zip(tensors, _OFFSETS, strict=True)}
        read = {key: offsets(*each) for key, each in distinct.items()}  # each waits for the device
        self._real, keys, self._padded, padded_keys = (read[id(x)] for x in tensors)
        self.same = np.array_equal(self._real, keys) and np.array_equal(self._padded, padded_keys)
        self._splits: dict[object, dict[str, Any]] = {}

    def made_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if these are the tensors whose values were read."""
        return all(of() is x for of, x in zip(self._tensors, tensors, strict=True))

    def split(self, tokens: int, cp: int, causal: bool, window: tuple[int, int]) -> dict[str, Any]:
        """Return mask and layout of the documents over `cp` ranks with `tokens` tokens each."""
        key = tokens, cp, causal, window
        if key not in self._splits:
            layout = self._layout(tokens * cp, cp)
            mask = self._mask(layout.n, causal, window)
            self._splits[key] = {"mask": mask, "layout": layout}
        return self._splits[key].copy()

    def _mask(self, n: int, causal: bool, window: tuple[int, int]) -> Mask:
        """Documents see themselves; padding, within and behind them, sees nothing."""
        length, room = np.diff(self._real), np.diff(self._padded)
        if len(length) != len(room):
            raise ConfigError(
                f"cu_seqlens_q has {len(length)} documents, cu_seqlens_q_padded {len(room)}"
            )
        check_all(
            length <= room,
            lambda i: f"cu_seqlens_q: document {i} has {length[i]} tokens, padded to {room[i]}",
        )
        start = self._padded[:-1][length > 0]
        edges = np.stack([start, start + length[length > 0]], axis=1).reshape(-1)
        every = Mask.documents([0, *edges, n], causal, window)
        return Mask(n, every.pieces[np.isin(every.pieces.q0, start)], "documents")

    def _layout(self, n: int, cp: int) -> Layout:
        """Zigzag in each padded document; equal parts of the tokens behind the last one."""
        end = int(self._padded[-1])
        if end > n:
            raise ConfigError(f"cu_seqlens_q_padded ends at {end}, but {cp} ranks hold {n} tokens")
        layout = Layout.per_document_zigzag(self._padded, cp)
        if end == n:
            return layout
        ranks: Ints = np.arange(cp)
        edges = np.append(layout.edges, end + (n - end) // cp * (ranks + 1))
        return Layout(n, cp, edges, np.append(layout.owner, ranks), layout.name)
