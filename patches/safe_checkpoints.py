"""Publishes checkpoints only when they are whole, and verifies them before loading: see
`cp_ring.megatron.checkpoints`.
"""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.patches.patch import Patch, Replacement, replace_everywhere


def _replacements() -> Iterator[Replacement]:
    import megatron.training.async_utils as async_utils
    import megatron.training.checkpointing as checkpointing
    import megatron.training.initialize as initialize
    import megatron.training.training as training
    import torch
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from cp_ring.megatron.checkpoints import fsdp, loading, saving

    modules = [checkpointing, training, async_utils]
    yield from replace_everywhere(
        modules, "save_checkpoint", saving.guarded(checkpointing.save_checkpoint)
    )
    yield from replace_everywhere(
        modules, "load_checkpoint", loading.verified(checkpointing.load_checkpoint)
    )
    readers = [checkpointing, initialize, training]
    yield from replace_everywhere(
        readers, "load_args_from_checkpoint", loading.gated(checkpointing.load_args_from_checkpoint)
    )
    yield training, "setup_model_and_optimizer", saving.locked(training.setup_model_and_optimizer)
    finalize = saving.guarded_finalize(async_utils.maybe_finalize_async_save)
    yield from replace_everywhere(modules, "maybe_finalize_async_save", finalize)
    yield checkpointing, "read_metadata", loading.tracker_reader(checkpointing.read_metadata)
    yield (
        checkpointing,
        "ensure_directory_exists",
        saving.leave_out_folder(checkpointing.ensure_directory_exists),
    )
    # until 0.18 it is a function
    opener = "maybe_msc" if hasattr(checkpointing, "maybe_msc") else "open_file"
    yield checkpointing, opener, saving.Opener(getattr(checkpointing, opener))
    yield dist_checkpointing, "save", saving.written_aside(dist_checkpointing.save)
    yield (
        torch.distributed.checkpoint,
        "save",
        fsdp.written_aside(torch.distributed.checkpoint.save),
    )
    yield FileSystemWriter, "finish", saving.tolerant(FileSystemWriter.finish)
    yield from _writers()


def _writers() -> Iterator[Replacement]:
    """Replaces what rank 0 alone writes, and the writers of each rank."""
    import megatron.core.dist_checkpointing.serialization as serialization
    import megatron.core.dist_checkpointing.strategies.common as common
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    from cp_ring.megatron.checkpoints import saving, writers

    yield serialization, "save_config", saving.tolerant(serialization.save_config)
    if hasattr(serialization, "save_common"):  # 0.17 and 0.18; later there is no common.pt
        yield serialization, "save_common", saving.tolerant(serialization.save_common)
    strategy = getattr(common, "TorchCommonSaveStrategy", None)  # 0.16
    if strategy is not None:
        yield strategy, "save_common", saving.tolerant(strategy.save_common)
    writer = filesystem_async.FileSystemWriterAsync
    yield (
        writer,
        "get_save_function_and_args",
        writers.summing(writer.get_save_function_and_args, saving.guarding),
    )
    yield writer, "prepare_write_data", writers.own_copies(writer.prepare_write_data)
    for name in ("get_write_results_queue", "_get_write_results_queue"):  # the latter in 0.16
        if hasattr(filesystem_async, name):
            yield filesystem_async, name, writers.queue_of_results(getattr(filesystem_async, name))


PATCH = Patch(
    what="writes checkpoints aside, publishes them whole with a manifest, locks the folder, and "
    "loads the last good one",
    why="a save that is killed or fails can leave a tracker or a folder that no restart can load",
    when="!program",
    replacements=_replacements,
)
