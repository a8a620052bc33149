"""What the processes that write a checkpoint's shards do beside writing: checksums, own copies of
tensors, a queue of results.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

from cp_ring.megatron.checkpoints import manifest
from cp_ring.megatron.wrapping import Function, around
from cp_ring.runtime import RUNTIME

SUMS = ".sums.{}.json"


def summing(
    get_save_function_and_args: Callable[..., Any], guarding: Callable[[], bool]
) -> Callable[..., Any]:
    """The writer's method, whose save function then also leaves the checksums of its files beside
    them.

    The process that wrote a file computes its checksum, outside of the training loop where saving
    is asynchronous.
    """

    @functools.wraps(get_save_function_and_args)
    def with_sums(self: Any) -> Any:
        save, preload, args = get_save_function_and_args(self)
        if save is not None and guarding():
            save = functools.partial(write_and_sum, save, os.getpid())
        return save, preload, args

    return with_sums


def write_and_sum(
    save: Callable[..., Any], trainer: int, rank: int, buckets: list[Any], *rest: Any
) -> None:
    """Writes the buckets (path, name, data), then the checksums of their files, as they can be read
    back.

    trainer: id of the process that trains. Another process that writes for it ends when it does.
    """
    if os.getpid() != trainer:
        end_with_parent()
    save(rank, buckets, *rest)
    paths = [Path(bucket[0]) for bucket in buckets]
    try:
        sums = {path.name: manifest.describe(path) for path in paths}
        (paths[0].parent / SUMS.format(rank)).write_text(json.dumps(sums))
    except OSError:
        return  # the writer itself has reported on it, or `saving.publish` will


@around
def own_copies(prepare_write_data: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """The writer's method, which then copies the tensors that training would change while another
    process still writes them.

    Tensors on a GPU are copied to the host anyway; those on the CPU would travel to the writer as
    shared memory.
    """
    prepare_write_data(self, *args, **kwargs)
    if not _asynchronous():
        return
    for _, _, (_, tensors) in self.write_buckets or []:
        tensors[:] = [
            (item, tensor.clone() if tensor.device.type == "cpu" else tensor)
            for item, tensor in tensors
        ]


@around
def queue_of_results(make: Function, *args: Any, **kwargs: Any) -> Any:
    """The queue for the writer's results: of this process, unless another process writes.

    Megatron starts a server in either case, which stays behind if the process that trains is
    killed; this one does not.
    """
    return _shared_queue() if _asynchronous() else queue.Queue()


@RUNTIME.cache()
def _shared_queue() -> Any:
    manager = SyncManager(ctx=multiprocessing.get_context("fork"))
    manager.start(initializer=end_with_parent)
    return manager.Queue()


@RUNTIME.cache()
def end_with_parent() -> None:
    """From now on this process ends when its parent does, however the parent ends."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _asynchronous() -> bool:
    from megatron.training.global_vars import get_args

    return bool(getattr(get_args(), "async_save", False))
