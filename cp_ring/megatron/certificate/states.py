"""What the training must find as it was before the probes: random states, settings, and what
Megatron collects while a model runs.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from cp_ring.comm.agreement import begin_anew
from cp_ring.megatron import settings
from cp_ring.megatron.wrapping import replaced
from cp_ring.observe import watchdog


@contextmanager
def _losses_of_models_restored() -> Iterator[None]:
    """Afterwards restores what Megatron collects of the losses of predicted tokens, of experts and
    of indexers, and of packed batches.
    """
    # heavy, and installed with Megatron only
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.moe import moe_utils

    # the losses of experts since 0.18
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    # counts the tokens of packed batches since 0.19
    training = sys.modules.get("megatron.training.training")
    # has a value for each layer of the first model that runs
    sparse = sys.modules.get("megatron.core.transformer.experimental_attention_variant.dsa")
    scale = "main_loss_backward_scale"
    scalers = (
        getattr(mtp, "MTPLossAutoScaler", None),
        getattr(sparse, "DSAIndexerLossAutoScaler", None),
        moe_utils.MoEAuxLossAutoScaler,
    )
    fresh: list[tuple[Any, str, Any]] = [
        (getattr(mtp, "MTPLossLoggingHelper", None), "tracker", {}),
        (getattr(sparse, "DSAIndexerLossLoggingHelper", None), "tracker", {}),
        *((scaler, scale, getattr(scaler, scale, None)) for scaler in scalers),
        (moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", {}),
        (logging, "_MOE_METRICS_TRACKER", None),
        (training, "_seqlen_stats_in_iteration", None),
        (training, "_seqlen_stats_active", False),
    ]
    with replaced(*(change for change in fresh if hasattr(*change[:2]))):
        yield


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
        stack.enter_context(_losses_of_models_restored())
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
