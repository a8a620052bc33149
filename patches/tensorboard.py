"""TensorBoard's log may be on a full disk: what Megatron writes there does not end the job."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    from megatron.training import global_vars

    from cp_ring.megatron.training_log import TolerantWriter
    from cp_ring.observe import progress

    set_writer = global_vars._set_tensorboard_writer

    @functools.wraps(set_writer)
    def set_tolerant_writer(*args: Any, **kwargs: Any) -> None:
        with progress.warning_once("TensorBoard's log"):
            set_writer(*args, **kwargs)
        writer = global_vars._GLOBAL_TENSORBOARD_WRITER
        if writer is not None:
            global_vars._GLOBAL_TENSORBOARD_WRITER = TolerantWriter(writer)

    yield global_vars, "_set_tensorboard_writer", set_tolerant_writer


PATCH = Patch(
    what="a TensorBoard log that cannot be written, as on a full disk, gives one warning and no "
    "error",
    why="Megatron calls TensorBoard's writer at every logged step, and the writer raises at each "
    "call once a write has failed",
    when="!program",
    replacements=_replacements,
)
