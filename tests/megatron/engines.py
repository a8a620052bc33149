"""Megatron's own generation engines on CPU ranks, with its flash-attn calls answered by torch.

Shapes: s queries and m keys of a request, h query and g key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cp_ring.megatron.wrapping import replaced

BLOCK = 16  # tokens of a block of the cache


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: Any) -> tuple[Tensor, Tensor]:
    """Out [s, h, d] and lse [h, s] of the last s of m tokens: q [s, h, d], k and v [m, g, d]."""
    s, m = len(q), len(k)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    distance = torch.arange(m - s, m)[:, None] - torch.arange(m)
    hidden = distance < 0
    if window[0] >= 0:
        hidden |= distance > window[0]
    scores = torch.einsum("shd,mhd->hsm", q, k) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hsm,mhd->shd", scores.softmax(-1), v), scores.logsumexp(-1)


def _of_blocks(cache: Tensor, table: Tensor) -> Tensor:
    """Tokens [requests, m, g, d] of the cache [blocks, size, g, d]."""
    return cache[table.long().clamp(min=0)].flatten(1, 2)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, *_: Any, **of: Any
) -> Any:
    keys, values = (_of_blocks(x, of["block_table"]) for x in (k, v))
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
    for i, m in enumerate(key_ends.diff().tolist()):
        at = slice(int(ends[i]), int(ends[i + 1]))
        out[at], lse[:, at] = _attend(
            q[at], keys[i, :m], values[i, :m], of["softmax_scale"], of["window_size"]
        )
    return (out, lse, None) if of["return_attn_probs"] else out


def _with_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **of: Any) -> Any:
    keys, values = (_of_blocks(x, of["block_table"]) for x in (k_cache, v_cache))
    parts = [
        _attend(q[i], keys[i, :m], values[i, :m], of["softmax_scale"], of["window_size"])
        for i, m in enumerate(of["cache_seqlens"].tolist())
    ]
    out, lse = map(torch.stack, zip(*parts, strict=True))
    return (out, lse) if of.get("return_softmax_lse") else out


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """flash-attn and the Triton kernel that appends to the cache, by torch."""
    from megatron.core.inference.contexts import dynamic_context
    from megatron.core.inference.utils import InferenceMode
    from megatron.core.transformer import attention

    with replaced(
        (dynamic_context.DynamicInferenceContext, "TOKEN_ROUNDER", 4),
        (attention, "flash_attn_varlen_func", _varlen),
        (attention, "flash_attn_with_kvcache", _with_cache),
        (attention, "is_fa_min_version", lambda _: True),
        (dynamic_context, "triton_append_key_value_cache", None),
    ):
        try:
            yield
        finally:
            InferenceMode.unset_active()  # engines leave it on, and training needs it off


def _controller(model: Any, context: Any) -> Any:
    from megatron.core.inference.model_inference_wrappers.gpt import gpt_inference_wrapper
    from megatron.core.inference.text_generation_controllers import text_generation_controller

    wrapped = gpt_inference_wrapper.GPTInferenceWrapper(model, context)
    wrapped.model_is_pipeline_parallel = False
    words = {
        "vocab_size": 64, "eod": -1, "bos": None,
        "tokenize": lambda text, **_: [int(word) for word in text.split()],
        "detokenize": lambda tokens, **_: " ".join(map(str, tokens)),
    }  # fmt: skip
    return text_generation_controller.TextGenerationController(wrapped, SimpleNamespace(**words))


def dynamic(model: Any, prompts: Tensor, count: int, chunk: int | None = None) -> Tensor:
    """The likeliest tokens [b, n + count] by `DynamicInferenceEngine`; with `chunk` prompts are
    computed that many tokens at a time.
    """
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts import DynamicInferenceContext
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
    from megatron.core.inference.inference_request import DynamicInferenceRequest
    from megatron.core.inference.sampling_params import SamplingParams

    sizes = InferenceConfig(
        max_sequence_length=96, buffer_size_gb=0.01, block_size_tokens=BLOCK, max_requests=8,
        max_tokens=chunk, enable_chunked_prefill=chunk is not None,
    )  # fmt: skip
    context = DynamicInferenceContext(model.config, sizes)
    engine = DynamicInferenceEngine(_controller(model, context), context)
    wanted = SamplingParams(num_tokens_to_generate=count, termination_id=-1, top_k=1)
    for number, prompt in enumerate(prompts):
        request = DynamicInferenceRequest(
            request_id=number, prompt_tokens=prompt, sampling_params=wanted, block_size_tokens=BLOCK
        )
        engine._add_request(request)
    found = {}
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            request = record.merge()
            found[request.request_id] = list(request.generated_tokens)
    return torch.cat([prompts, torch.tensor([found[i] for i in range(len(prompts))])], 1)


def static(model: Any, prompts: Tensor, count: int) -> Tensor:
    """The same by `StaticInferenceEngine` and its `StaticInferenceContext`."""
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.engines.static_engine import StaticInferenceEngine
    from megatron.core.inference.sampling_params import SamplingParams

    controller = _controller(model, StaticInferenceContext(len(prompts), 96))
    engine = StaticInferenceEngine(controller, max_batch_size=len(prompts), legacy=True)
    wanted = SamplingParams(num_tokens_to_generate=count, top_k=1)
    done = engine.generate(
        [" ".join(map(str, row.tolist())) for row in prompts], sampling_params=wanted
    )
    return torch.stack([torch.cat([prompts[i], r.generated_tokens]) for i, r in enumerate(done)])
