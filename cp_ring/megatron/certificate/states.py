"""Restores what training must find unchanged after the probes: random states, settings, and the
values that Megatron collects while a model runs.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from cp_ring.comm.agreement import begin_anew
from cp_ring.megatron import settings
from cp_ring.megatron.wrapping import loaded_modules, replaced
from cp_ring.observe import watchdog

_FRESH: dict[tuple[str, str], Any] = {
    ("MTPLossLoggingHelper", "tracker"): dict,
    ("DSAIndexerLossLoggingHelper", "tracker"): dict,  # one value for each layer of the first model
    ("moe_utils", "_MOE_LAYER_WISE_LOGGING_TRACKER"): dict,
    ("moe_logging", "_MOE_METRICS_TRACKER"): type(None),
    ("training", "_seqlen_stats_in_iteration"): type(None),
    ("training", "_seqlen_stats_active"): bool,
}
"""The places where Megatron collects values: classes and modules by name, with an attribute and the
function that makes its first value.
"""
_SCALERS = ("MTPLossAutoScaler", "DSAIndexerLossAutoScaler", "MoEAuxLossAutoScaler")
_SCALE = "main_loss_backward_scale"


def _collected() -> Iterator[tuple[Any, str, Any]]:
    """Yield where Megatron collects losses of predicted tokens, of experts and of indexers, and
    packed batches, each with a fresh value for the probes.
    """
    for module in loaded_modules("megatron."):
        known = {**vars(module), module.__name__.rpartition(".")[2]: module}
        for (owner, name), first in _FRESH.items():
            if hasattr(known.get(owner), name):
                yield known[owner], name, first()
        for scaler in (known[name] for name in _SCALERS if hasattr(known.get(name), _SCALE)):
            yield scaler, _SCALE, getattr(scaler, _SCALE)


def _copied(state: Any) -> Any:
    """Copy a state of Megatron's tracker if it is a generator, which CUDA graphs need and which
    changes in place. A tensor needs no copy, because Megatron replaces it.
    """
    return state.clone_state() if isinstance(state, torch.Generator) else state


@contextmanager
def states_restored() -> Iterator[None]:
    """Restore random states, cp_ring's settings, and the values that Megatron and the watchdog
    collect, after the block.
    """
    from megatron.core import tensor_parallel  # slow to import, and installed with Megatron only

    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_available():
            stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state())
        tracker = tensor_parallel.get_cuda_rng_tracker()
        stack.callback(
            tracker.set_states,
            {name: _copied(state) for name, state in tracker.get_states().items()},
        )
        stack.callback(settings.configure, settings.current())
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
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
