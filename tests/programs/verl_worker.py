"""The lines of docs/programs.md about verl with verl's own packing, on CPU ranks: FILE CHECKOUT.

FILE gets what the certificate covers, and how it stops labels that are rolled after the split.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

import cp_ring.megatron
from cp_ring.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "programs.md"
PACKING = "verl.models.mcore.util"


def stand_in(checkout: Path) -> None:
    """verl's file that packs, and of the packages that it imports what it uses here."""
    needed = {"device": {"is_npu_available": False}, "model": {"CausalLMOutputForPPO": object}}
    for name, values in needed.items():
        made = sys.modules[f"verl.utils.{name}"] = ModuleType(f"verl.utils.{name}")
        vars(made).update(values)
    for name in ("verl", "verl.utils", "verl.models", "verl.models.mcore"):
        sys.modules[name] = ModuleType(name)
    path = checkout.joinpath(*PACKING.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(PACKING, path)
    assert spec is not None and spec.loader is not None
    sys.modules[PACKING] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACKING])


def block(words: str, *changes: tuple[str, str]) -> dict[str, Any]:
    """The names that the Python block of the page's part on verl with these words defines."""
    part = PAGE.read_text().split("\n## verl\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
    (text,) = (each for each in blocks if words in each)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    names: dict[str, Any] = {}
    exec(text, names)
    return names


def main(file: Path, checkout: Path) -> None:
    from docs.examples import megatron_core as example  # enables ring attention on the CPU

    block("# my_cp_ring.py", ("enable(", "enable(cpu=True, "))
    example.parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    example.model_parallel_cuda_manual_seed(1)
    config = example.TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, attention_dropout=0.0,
        hidden_dropout=0.0, context_parallel_size=dist.get_world_size(),
        calculate_per_token_loss=True, use_cpu_initialization=True, masked_softmax_fusion=False,
    )  # fmt: skip
    stand_in(checkout)
    right = block(f"from {PACKING} import")["step"]
    certificate = cp_ring.megatron.certify(config, example.build, right)
    found: dict[str, Any] = {
        "models": sorted({probe.layer for probe in certificate.probes}),
        "not covered": certificate.not_covered, "stopped": "",
    }  # fmt: skip
    rolled = ('mine("labels")[0]', 'mine("tokens")[0].roll(-1, 1)')
    wrong = block(f"from {PACKING} import", rolled)["step"]
    try:
        cp_ring.megatron.certify(config, example.build, wrong)
    except ConfigError as error:
        found["stopped"] = str(error)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*map(Path, sys.argv[1:]))
    dist.destroy_process_group()
