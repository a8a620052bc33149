"""What the training must find as it was before the probes: random states, settings, and what
Megatron collects while a model runs.
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
    ("DSAIndexerLossLoggingHelper", "tracker"): dict,  # a value for each layer of the first model
    ("moe_utils", "_MOE_LAYER_WISE_LOGGING_TRACKER"): dict,
    ("moe_logging", "_MOE_METRICS_TRACKER"): type(None),
    ("training", "_seqlen_stats_in_iteration"): type(None),
    ("training", "_seqlen_stats_active"): bool,
}
"""What Megatron collects: classes and modules by name, with an attribute and what makes its first
value.
"""
_SCALERS = ("MTPLossAutoScaler", "DSAIndexerLossAutoScaler", "MoEAuxLossAutoScaler")
_SCALE = "main_loss_backward_scale"


def _collected() -> Iterator[tuple[Any, str, Any]]:
    """What Megatron collects of the losses of predicted tokens, of experts and of indexers, and of
    packed batches, with what is to stand there while the probes run.
    """
    for module in loaded_modules("megatron."):
        known = {**vars(module), module.__name__.rpartition(".")[2]: module}
        for (owner, name), first in _FRESH.items():
            if hasattr(known.get(owner), name):
                yield known[owner], name, first()
        for scaler in (known[name] for name in _SCALERS if hasattr(known.get(name), _SCALE)):
            yield scaler, _SCALE, getattr(scaler, _SCALE)


def _copied(state: Any) -> Any:
    """A state of Megatron's tracker. A generator, which CUDA graphs need, goes on where a tensor is
    replaced.
    """
    return state.clone_state() if isinstance(state, torch.Generator) else state


@contextmanager
def states_restored() -> Iterator[None]:
    """Afterwards restores random states, cp_ring's settings, and what Megatron and the watchdog
    collect while a model runs.
    """
    from megatron.core import tensor_parallel  # heavy, and installed with Megatron only

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
        begin_anew()  # so that ranks compare the calls of probes, and then those of the training
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
