"""Megatron's own validation of a job's arguments, asked before any rank starts.

It is written for a rank with CUDA and TransformerEngine. Here it is asked on any machine, in this
process.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.compat import logits_without_te
from cp_ring.megatron.flags.layer_pattern import LINEAR_HEADS
from cp_ring.megatron.rejection import megatrons_text
from cp_ring.megatron.wrapping import replaced

_FUSED = {
    "megatron.core.transformer.moe.moe_utils": (
        "fused_permute fused_permute_with_probs fused_unpermute fused_sort_chunks_by_index "
        "fused_sort_chunks_by_index_with_probs"
    ),
    "megatron.core.models.common.embeddings.rope_utils": (
        "fused_apply_rotary_pos_emb fused_apply_rotary_pos_emb_thd"
    ),
}
"""Functions of TransformerEngine that Megatron's validation looks for."""


def rejection(args: argparse.Namespace, ranks: int) -> str:
    """Return in one line why Megatron's own validation rejects these parsed arguments for a job of
    `ranks` ranks; "" if it accepts them.

    The validation finds an H100 with TransformerEngine, whatever is on this machine. `args` do not
    change.
    """
    from megatron.training import arguments

    asked = copy.deepcopy(args)
    asked.rank = 0
    asked.local_rank = 0
    asked.world_size = ranks
    if Asked(args).cp_ring and args.cp_ring_recurrent != "heads":  # as the job's own patch does
        for name in LINEAR_HEADS:
            if count := getattr(args, name, None):
                setattr(asked, name, count * Asked(args).cp)
    sharded = args.use_torch_fsdp2 or args.use_megatron_fsdp
    with (
        # before Blackwell Megatron demands one connection, and several with sharded parameters
        _as_on_a_gpu("8" if sharded else "1"),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            with logits_without_te(asked):
                arguments.validate_args(asked)
            arguments.core_transformer_config_from_args(asked)
        # assertions, and whatever else a check of Megatron's raises
        except (Exception, SystemExit) as error:
            return megatrons_text(error)
    return ""


@contextlib.contextmanager
def _as_on_a_gpu(connections: str) -> Iterator[None]:
    """Let Megatron's validation find an H100 with TransformerEngine within the block, if there is
    none here.
    """
    import importlib

    import torch

    changes: list[tuple[Any, str, Any]] = []
    if not torch.cuda.is_available():
        properties = argparse.Namespace(
            major=9, minor=0, multi_processor_count=132, total_memory=80 << 30
        )
        answers = {
            "get_device_capability": (9, 0),
            "get_device_properties": properties,
            "device_count": 8,
        }
        for name, answer in answers.items():
            changes += [(torch.cuda, name, mock.Mock(return_value=answer))]
    for name, functions in _FUSED.items():
        module = importlib.import_module(name)
        changes += [
            (module, function, object())
            for function in functions.split()
            if getattr(module, function, None) is None
        ]
    connected = mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": connections})
    with connected, replaced(*changes):
        yield
