"""Publishes checkpoints only when they are whole, and verifies them before loading: see `cp_ring.megatron.checkpoints`."""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.patches.patch import Patch, Replacement, replace_everywhere


def _replacements() -> Iterator[Replacement]:
    import megatron.training.async_utils as async_utils
    import megatron.training.checkpointing as checkpointing
    import megatron.training.training as training
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from cp_ring.megatron.checkpoints import loading, saving

    modules = [checkpointing, training, async_utils]
    yield from replace_everywhere(modules, "save_checkpoint", saving.guarded(checkpointing.save_checkpoint))
    yield from replace_everywhere(modules, "load_checkpoint", loading.verified(checkpointing.load_checkpoint))
    finalize = saving.guarded_finalize(async_utils.maybe_finalize_async_save)
    yield from replace_everywhere(modules, "maybe_finalize_async_save", finalize)
    yield checkpointing, "read_metadata", loading.tracker_reader(checkpointing.read_metadata)
    yield checkpointing, "ensure_directory_exists", saving.leave_out_folder(checkpointing.ensure_directory_exists)
    opener = "maybe_msc" if hasattr(checkpointing, "maybe_msc") else "open_file"  # until 0.18 it is a function
    yield checkpointing, opener, saving.Opener(getattr(checkpointing, opener))
    yield dist_checkpointing, "save", saving.written_aside(dist_checkpointing.save)
    yield FileSystemWriter, "finish", saving.tolerant(FileSystemWriter.finish)
    yield from _writers()


def _writers() -> Iterator[Replacement]:
    """The functions that write: those of rank 0 alone, and those of the writers of each rank."""
    import megatron.core.dist_checkpointing.serialization as serialization
    import megatron.core.dist_checkpointing.strategies.common as common
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    from cp_ring.megatron.checkpoints import saving

    yield serialization, "save_config", saving.tolerant(serialization.save_config)
    if hasattr(serialization, "save_common"):  # 0.17 and 0.18; later there is no common.pt
        yield serialization, "save_common", saving.tolerant(serialization.save_common)
    strategy = getattr(common, "TorchCommonSaveStrategy", None)  # 0.16
    if strategy is not None:
        yield strategy, "save_common", saving.tolerant(strategy.save_common)
    writer = filesystem_async.FileSystemWriterAsync
    yield writer, "get_save_function_and_args", saving.summing(writer.get_save_function_and_args)
    yield writer, "prepare_write_data", saving.own_copies(writer.prepare_write_data)
    for name in ("get_write_results_queue", "_get_write_results_queue"):  # the latter in 0.16
        if hasattr(filesystem_async, name):
            yield filesystem_async, name, saving.queue_of_results(getattr(filesystem_async, name))


PATCH = Patch(
    name="safe_checkpoints",
    what="writes checkpoints aside, publishes them whole with a manifest of checksums, and loads the last good one",
    why="a save that is killed or fails can leave a tracker or a folder that no restart can load",
    replacements=_replacements,
)
