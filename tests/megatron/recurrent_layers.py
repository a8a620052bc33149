"""Mamba and gated delta net layers alone: whole batch rows on one rank, or their parts on ranks.

As a program, `recurrent_layers.py OUT.json`, it is one of two ranks, which are compared with one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.distributed as dist

from cp_ring import patches
from cp_ring.options import Options
from cp_ring.patches import cpu_runtime
from tests.megatron.groups import end_groups

N, ROWS, HIDDEN = 64, 2, 32
OFFSETS = np.array([0, 5, 30, 64, 100, 101, 128])  # of documents in the stream of two batch rows


@dataclass(frozen=True)
class Case:
    """A layer, how its tokens are split, whether they have documents, what ranks exchange, and the
    fault that must show (see tests.parity.faults).
    """

    layer: str
    layout: str
    documents: bool
    recurrent: str = "heads"

    @property
    def fault(self) -> str:
        if self.documents:
            return "state begins anew too late"
        return {"heads": "state in the order of another layout"}.get(
            self.recurrent, "state passed by another layout"
        )


CASES = {
    " ".join([layer, layout, *["documents"] * documents, recurrent]): Case(
        layer, layout, documents, recurrent
    )
    for layer in ("mamba", "delta_net", "delta_net_2")
    for layout, documents in (
        ("zigzag", False),
        ("contiguous", False),
        ("zigzag", True),
        ("balanced", True),
    )
    for recurrent in ("heads", "states")
}


def configuration(cp: int, tp: int = 1) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cp_ring.megatron import compat

    sizes = {
        "mamba_head_dim": 8, "mamba_state_dim": 8, "mamba_num_groups": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    }  # fmt: skip
    return TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True,
        context_parallel_size=cp, tensor_model_parallel_size=tp,
        add_bias_linear=False, activation_func=torch.nn.functional.silu, **compat.known_arguments(TransformerConfig, sizes),
    )  # fmt: skip


class Norm(torch.nn.RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)


def build(kind: str, cp: int, tp: int = 1) -> Any:
    """The layer, with the same weights whatever `cp`."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm import gated_delta_net as package
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests.parity import recurrent  # noqa: F401

    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    linear = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    if kind == "mamba":
        return MambaMixer(
            configuration(cp),
            MambaMixerSubmodules(**linear),
            HIDDEN,
            layer_number=1,
            pg_collection=groups,
        )
    submodules = package.GatedDeltaNetSubmodules(**linear, out_norm=Norm)
    layer = package.GatedDeltaNet2 if kind == "delta_net_2" else package.GatedDeltaNet
    return layer(configuration(cp, tp), submodules, layer_number=1, pg_collection=groups)


def whole_rows() -> torch.Tensor:
    """Hidden states [N, ROWS, HIDDEN]."""
    return torch.randn(N, ROWS, HIDDEN, generator=torch.Generator().manual_seed(9))


def call(layer: Any, hidden: torch.Tensor, packed: Any) -> torch.Tensor:
    """Output [s, b, HIDDEN] of hidden states [s, b, HIDDEN]."""
    mask = {} if "MambaMixer" in type(layer).__name__ else {"attention_mask": None}
    out: torch.Tensor = layer(hidden, packed_seq_params=packed, **mask)[0]
    return out


def step(case: Case, cp: int, fault: str = "") -> dict[str, Any]:
    """Output of both ranks in order, and the norm of each parameter's gradient, of all tokens
    together.
    """
    from megatron.core import parallel_state

    from cp_ring.megatron import settings
    from cp_ring.megatron.data.documents import DocumentParams, Documents
    from tests.parity.faults import planted

    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    try:
        settings.configure(
            Options.make(
                enabled=True,
                layout=case.layout,
                document_mask=case.documents,
                recurrent=case.recurrent,
            )
        )
        documents = Documents.in_rows(
            OFFSETS if case.documents else np.arange(ROWS + 1) * N, ROWS, case.layout, cp
        )
        rank = parallel_state.get_context_parallel_rank()
        weights = torch.randn(N, ROWS, HIDDEN, generator=torch.Generator().manual_seed(3))
        mine, wanted = (part(x, documents, rank) for x in (whole_rows(), weights))
        with planted(fault):
            layer = build(case.layer, cp)
            out = call(layer, mine, DocumentParams.carry(documents) if case.documents else None)
            (out * wanted).sum().backward()
        parts = [torch.empty_like(out) for _ in range(cp)]
        group = parallel_state.get_context_parallel_group()
        dist.all_gather(parts, out.detach().contiguous(), group=group)
        order = torch.cat([documents.places(r) for r in range(cp)])
        whole = torch.zeros(N, ROWS, HIDDEN).scatter(
            0, order[..., None].expand(-1, -1, HIDDEN), torch.cat(parts)
        )
        gradients = {
            name: p.grad if p.grad is not None else torch.zeros_like(p)
            for name, p in layer.named_parameters()
        }
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group)
        return {
            "out": whole,
            "gradients": {name: float(gradient.norm()) for name, gradient in gradients.items()},
        }
    finally:
        end_groups()


def part(x: torch.Tensor, documents: Any, rank: int) -> torch.Tensor:
    """The tokens [N / cp, ROWS, HIDDEN] that `rank` holds of `x` [N, ROWS, HIDDEN]."""
    return x.gather(0, documents.places(rank)[..., None].expand(-1, -1, x.shape[-1]))


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Largest difference of the outputs, or of a gradient's norm, over the largest one of all."""
    largest = max(theirs["gradients"].values())
    gradients = [
        abs(ours["gradients"][name] - norm) / largest for name, norm in theirs["gradients"].items()
    ]
    return max(
        float((ours["out"] - theirs["out"]).abs().max() / theirs["out"].abs().max()), *gradients
    )


def norm_on_tensor_parallel_ranks() -> float:
    """How far the gradients of `out_norm` of a gated delta net layer differ between the ranks."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    try:
        layer = build("delta_net", 1, tp=2)
        call(layer, whole_rows(), None).square().sum().backward()
        own = layer.out_norm.weight.grad
        assert own.any()
        other = own.clone()
        dist.broadcast(other, 0)
        differ = (own - other).abs().max() / own.abs().max()
        dist.all_reduce(differ, dist.ReduceOp.MAX)
        return float(differ)
    finally:
        end_groups()


def main() -> None:
    from megatron.core.tensor_parallel import random

    from cp_ring.megatron import compat
    from tests.parity import recurrent  # noqa: F401

    cpu_runtime.apply_in_worker()
    random._set_cuda_rng_state = cpu_runtime._set_rng_state
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo")
    patches.get("recurrent_layers").apply()
    version = compat.megatron_version()
    missing = {"delta_net_2": not compat.within(">=0.20.dev0")}
    results = {}
    for name, case in CASES.items():
        if missing.get(case.layer):
            continue
        one, two, fault = step(case, 1), step(case, 2), step(case, 2, case.fault)
        results[name] = {"two": difference(two, one), "fault": difference(fault, one)}
    norm = norm_on_tensor_parallel_ranks()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(
            json.dumps({"version": version, "cases": results, "norm": norm})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
