"""Restores what training must find unchanged after the probes: the environment, random states,
torch's switches, settings, and the values that Megatron collects while a model runs.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from cp_ring.comm.agreement import begin_anew
from cp_ring.megatron import settings
from cp_ring.megatron.adapter.ahead import LAYERS
from cp_ring.megatron.wrapping import loaded_modules, replaced
from cp_ring.observe import watchdog

_SWITCHES: Any = (
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)
"""Functions that read and write a state of the process."""


def _collected() -> Iterator[tuple[Any, str, Any]]:
    """Yield where Megatron collects losses of predicted tokens, of experts and of indexers, and
    packed batches, each with a fresh value for the probes.
    """
    fresh: dict[str, Any] = {  # of attributes of classes and modules
        "MTPLossLoggingHelper.tracker": {},
        "DSAIndexerLossLoggingHelper.tracker": {},  # a value for each layer of the first model
        "moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER": {},
        "moe_logging._MOE_METRICS_TRACKER": None,
        "training._seqlen_stats_in_iteration": None,
        "training._seqlen_stats_active": False,
        "MTPLossAutoScaler.main_loss_backward_scale": torch.ones(()),
        "DSAIndexerLossAutoScaler.main_loss_backward_scale": None,
        "MoEAuxLossAutoScaler.main_loss_backward_scale": None,
    }
    for module in loaded_modules("megatron."):
        known = {**vars(module), module.__name__.rpartition(".")[2]: module}
        for path, value in fresh.items():
            owner, name = path.split(".")
            if hasattr(known.get(owner), name):
                yield known[owner], name, value


@contextmanager
def states_restored() -> Iterator[None]:
    """Restore the environment, random states, torch's switches, cp_ring's settings, and the values
    that Megatron and the watchdog collect, after the block.
    """
    from megatron.core import tensor_parallel  # slow to import, and installed with Megatron only

    with ExitStack() as stack:
        # Megatron's models export variables for TransformerEngine, and reject values of others
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.clear)
        for read, write in _SWITCHES:
            stack.callback(write, read())
        if torch.cuda.is_available():
            stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state())
        tracker = tensor_parallel.get_cuda_rng_tracker()
        # a tensor is replaced, but a generator, which CUDA graphs need, changes in place
        states = {
            name: state.clone_state() if isinstance(state, torch.Generator) else state
            for name, state in tracker.get_states().items()
        }
        stack.callback(tracker.set_states, states)
        stack.callback(settings.configure, settings.current())
        stack.callback(LAYERS.update, {*LAYERS})
        stack.callback(LAYERS.clear)
        stack.enter_context(replaced(*_collected()))
        begin_anew()  # ranks then compare the calls of the probes, and later those of training
        stack.callback(begin_anew)
        try:
            yield
        finally:
            # the next wait may be long: rank 0 indexes a data set while the others wait in a
            # barrier
            watchdog.rest()
            gc.collect()
            torch.cuda.empty_cache()  # does nothing without CUDA
