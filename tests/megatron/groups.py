"""Process groups of a worker that makes Megatron's again for each case."""

import torch.distributed as dist
from torch.distributed import distributed_c10d


def end_groups() -> None:
    """Ends all groups but the world. A collective: no rank leaves one that another still needs.

    A thread of each group of gloo wakes a hundred times a second, so that hundreds of groups keep a
    core busy.
    """
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()
    for group in [*distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
