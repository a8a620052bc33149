"""Keeps the probes apart from the job: states are restored, and a probe that fails on one rank ends
on all of them.

The probes talk over process groups of their own, with the ranks and backends of the job's. A rank
whose probe raises closes these groups, so that ranks that wait for it stop waiting; the job's own
groups stay usable.
"""

from __future__ import annotations

import datetime
import gc
import hashlib
import itertools
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cp_ring.comm.transport import forget
from cp_ring.errors import ConfigError, KernelError, PlanError
from cp_ring.megatron import settings
from cp_ring.megatron.certificate.report import Failure
from cp_ring.megatron.rejection import first_line
from cp_ring.megatron.wrapping import replaced
from cp_ring.observe import watchdog
from cp_ring.runtime import RUNTIME

# how long a message of a probe may take, and a rank to end after another one has failed: a node may
# be busy
TIMEOUT_S = 600.0
POLL_S = 0.2
_KEY = "cp_ring/certificate/"
_number = RUNTIME.of_process(itertools.count())


class NotProbed(Exception):
    """Says in words what a probe could not do, and why."""


@contextmanager
def attempting(what: str) -> Iterator[None]:
    """Errors in the block become a `NotProbed` that begins with `what`; those of cp_ring stay as
    they are.
    """
    try:
        yield
    except (NotProbed, ConfigError, PlanError, KernelError):
        raise
    except Exception as error:
        raise NotProbed(f"{what}: {_shown(error)}") from error


def _shown(error: BaseException) -> str:
    """The kind of an error, and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}".rstrip(": ")


@dataclass
class ProbeGroups:
    """Copies of the job's process groups, while they are in force, and the thread that watches for
    failures of other ranks.
    """

    copies: dict[tuple[str, tuple[int, ...]], Any]
    store: Any
    key: str
    done: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def make(cls) -> ProbeGroups:
        """Copies each group of Megatron of more than one rank; all ranks of the job call it."""
        number = next(_number)
        copies: dict[tuple[str, tuple[int, ...]], Any] = {}
        for _, group in sorted(_groups_of_megatron().items()):
            for one in group if isinstance(group, list) else [group]:
                name = _identity(one)
                if len(name[1]) > 1 and name not in copies:
                    copies[name] = _new_group(*name, number)
        return cls(copies, dist.distributed_c10d._get_default_store(), f"{_KEY}{number}/")

    def in_force(self) -> AbstractContextManager[None]:
        """Replaces the groups in Megatron's parallel state by their copies, and afterwards restores
        them.
        """
        from megatron.core import parallel_state  # heavy, and installed with Megatron only

        def copy_of(group: Any) -> Any:
            return self.copies.get(_identity(group), group)

        return replaced(
            *(
                (
                    parallel_state,
                    name,
                    [copy_of(one) for one in group] if isinstance(group, list) else copy_of(group),
                )
                for name, group in _groups_of_megatron().items()
            )
        )

    def fail(self, error: BaseException, fatal: bool) -> Failure:
        """Tells all ranks that the probes of this one have failed."""
        order = int(self.store.add(self.key + "failed", 1))
        text = first_line(error) if fatal or isinstance(error, NotProbed) else ""
        return Failure(dist.get_rank(), order, text or _shown(error), fatal)

    def watch(self, store: Any) -> None:
        """Waits until the probes end, or a rank fails: then NCCL's waits are aborted, and a rank
        that still hangs is ended.
        """
        while not self.done.wait(POLL_S):
            if not store.check([self.key + "failed"]):
                continue
            for (backend, _), group in self.copies.items():
                if "nccl" in backend:
                    # gloo's waits end by themselves once the failed rank has closed its side
                    group.abort()
            if not self.done.wait(TIMEOUT_S):
                rank = dist.get_rank()
                print(
                    "cp_ring: error: --cp-ring-certify: a rank failed in the probe, and rank "
                    f"{rank} still waits for it; give --no-cp-ring-certify to train without the "
                    "probe",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                os._exit(2)
            return

    def close(self) -> None:
        """Destroys the copies, and with them the connections to other ranks, whose waits for this
        one fail then.
        """
        gc.collect()  # models, layers and autograd nodes of the probes refer to the groups
        for group in self.copies.values():
            forget(group)
            dist.destroy_process_group(group)
        self.copies.clear()


@contextmanager
def probe_groups() -> Iterator[ProbeGroups]:
    """Copies of Megatron's process groups; all ranks of the job enter it together, and leave it
    once all have finished.
    """
    groups = ProbeGroups.make()
    store = groups.store.clone()  # only one thread at a time may use a store
    thread = threading.Thread(
        target=groups.watch, args=(store,), name="cp_ring certificate", daemon=True
    )
    thread.start()
    try:
        yield groups
    finally:
        groups.done.set()
        thread.join(5)
        groups.close()


def _new_group(backend: str, ranks: tuple[int, ...], number: int) -> Any:
    """A process group that only its members make. `number` tells it from a former one, whose
    addresses the store still holds.

    torch would name it by how many groups the rank is in, which differs between pipeline stages.
    """
    name = (
        f"cp_ring_certificate_{number}_{backend}_"
        + hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
    )
    with (
        replaced((dist.distributed_c10d, "_process_group_name", lambda *args, **kwargs: name)),
        made_by_members(),
    ):
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        return dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)


@contextmanager
def made_by_members() -> Iterator[None]:
    """Process groups that are made in the block wait for their members only.

    Where the job's group is bound to a device, torch splits its NCCL communicator, and NCCL waits
    for all ranks of the job.
    """
    with replaced((dist.distributed_c10d._get_default_group(), "bound_device_id", None)):
        yield


def _groups_of_megatron() -> dict[str, Any]:
    from megatron.core import parallel_state  # heavy, and installed with Megatron only

    def of_groups(value: Any) -> bool:
        several = value if isinstance(value, list) else [value]
        return bool(several) and all(isinstance(each, dist.ProcessGroup) for each in several)

    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name.isupper() and of_groups(value)
    }


def _identity(group: Any) -> tuple[str, tuple[int, ...]]:
    return dist.get_backend(group), tuple(dist.get_process_group_ranks(group))


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
        try:
            yield
        finally:
            # the next wait may be long: rank 0 indexes a data set while the others wait in a
            # barrier
            watchdog.rest()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
