"""What several tests of the tools use."""

import importlib
import sys

import pytest

from cp_ring import patches
from cp_ring.tools.cli import main


@pytest.fixture
def cp_ring(monkeypatch, capsys):
    """Runs `cp-ring` in this process; returns its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["cp-ring", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def megatron(monkeypatch):
    """Makes Megatron's settings of a job; TransformerEngine counts as installed where they ask."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    from cp_ring.megatron import compat

    monkeypatch.setattr(compat, "has_transformer_engine", lambda: True)
    for name in (
        "permute",
        "permute_with_probs",
        "sort_chunks_by_index",
        "sort_chunks_by_index_with_probs",
        "unpermute",
    ):
        monkeypatch.setattr(moe_utils, f"fused_{name}", object())
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope_utils, name, object())
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("cpu_runtime", "arguments"):
        patches.get(name).apply()
    arguments = importlib.import_module("megatron.training.arguments")

    def make(line, ranks):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setattr(
            sys, "argv", ["pretrain_gpt", *line, "--no-create-attention-mask-in-dataloader"]
        )
        args = arguments.parse_args()
        arguments.validate_args(args)
        return args, arguments.core_transformer_config_from_args(args)

    yield make
    for name in reversed(patches.applied()):
        patches.get(name).revert()
