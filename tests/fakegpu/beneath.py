"""TransformerEngine's `DotProductAttention` on fake GPUs with cp_ring's ring beneath it."""

import importlib

import torch
import torch.distributed as dist

from cp_ring import Options, patches
from cp_ring.integrations import transformer_engine as beneath
from cp_ring.megatron import settings
from tests.fakegpu.accesses import mark, recorded
from tests.gpu.beside import Groups, connect

LAYERS = (4, 5)
"""Numbers of the two layers of a step."""


def blocks(cases, steps=3, **options):
    """Two layers a case, each `steps` times; "<case> <step>" is the part of the log.

    A case has arguments of the module, `comm`, `heads` and `edges` of packed documents. Raises
    `AssertionError` if a layer did not end in the ring.
    """
    calls = []
    right = beneath.ring_attention

    def counted(*tensors, **named):
        calls.append(named)
        out = right(*tensors, **named)
        return out

    beneath.ring_attention = counted
    undo = beneath.use_ring(("p2p", "a2a", "a2a+p2p"), strict=True, **options)
    with recorded():
        groups = Groups()
        for name, case in cases.items():
            mark(f"{name}, made")
            step = _step_of(groups, **case)
            for number in range(steps):
                mark(f"{name} {number}")
                calls.clear()
                step()
                assert len(calls) == len(LAYERS), f"{name}: {len(calls)} calls of the ring"
                assert all((x["sink"] is None) != ("softmax_type" in case) for x in calls)
    mark("end")
    undo()
    backends = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.backends"
    )
    assert backends.attn_forward_func_with_cp.__name__ == "attn_forward_func_with_cp"


def layers(cases):
    """Megatron's layers with its own attention class, as `tests.fakegpu.layers.blocks`, and the
    patch of --cp-ring-beneath. Raises `AssertionError` if a layer did not end in the ring.
    """
    from tests.fakegpu.layers import blocks

    calls = []
    right = beneath.ring_attention
    beneath.ring_attention = lambda *x, **named: calls.append(x) or right(*x, **named)
    settings.configure(Options(beneath="te"))
    patches.get("beneath_te").apply()
    blocks(cases, "transformer_engine", steps=3)
    assert len(calls) == 2 * 3 * len(cases), f"{len(calls)} calls of the ring"


def _step_of(
    groups, comm="p2p", heads=(4, 2), edges=None,
    tokens=256, **settings,
):  # fmt: skip
    from transformer_engine.pytorch import DotProductAttention

    h, g = heads
    form, mask = ("thd", "padding_causal") if edges else ("sbhd", "causal")
    if "window_size" in settings:
        settings["window_size"] = tuple(settings["window_size"])
    modules = [
        DotProductAttention(
            h, 64, num_gqa_groups=g, attention_dropout=0.0, qkv_format=form, attn_mask_type=mask,
            layer_number=number, **settings,
        ).cuda()
        for number in LAYERS
    ]  # fmt: skip
    for module in modules:
        group = groups.levels if comm == "a2a+p2p" else groups.world
        module.set_context_parallel_group(group, list(range(groups.size)), groups.stream, comm)
    row = (tokens,) if edges else (tokens, 1)
    q, k, v = (
        torch.empty((*row, x, 64), device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for x in (h, g, g)
    )
    ends = [torch.tensor(edges or [0], dtype=torch.int32, device="cuda") for _ in range(3)]
    sinks = [x for module in modules for x in module.parameters()]

    def step():
        more = {}
        if edges:
            names = "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"
            more = dict.fromkeys(names, ends.pop()) | {"max_seqlen_q": 512, "max_seqlen_kv": 512}
        out = q
        for module in modules:
            out = module(out, k, v, **more).unflatten(-1, (h, 64))
        # the engine's own thread would free the tensors of a step while the next one begins
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(out, [q, k, v, *sinks], torch.empty_like(out))

    connect(dist.group.WORLD)
    return step
