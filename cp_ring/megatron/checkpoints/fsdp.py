"""Checkpoints of --use-megatron-fsdp (fsdp_dtensor), which torch writes: aside, with a manifest,
published all at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from cp_ring.megatron.checkpoints import saving
from cp_ring.megatron.wrapping import Function, around


@around
def written_aside(save: Function, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.distributed.checkpoint.save`, which writes aside and publishes within a guarded save,
    and is as it was elsewhere.

    Raises `SaveFailed` on all ranks where a rank could not write.
    """
    writer = kwargs.get("storage_writer")
    if not saving.guarding() or type(writer) is not FileSystemWriter:
        return save(state_dict, *args, **kwargs)
    final = Path(writer.path)
    folder = saving.make_unfinished(final)
    writer.path = folder
    with saving.failing(final, folder):
        written = save(state_dict, *args, **kwargs)
    saving.publish(folder, final)
    return written
