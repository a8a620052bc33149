"""Process groups of a worker that makes Megatron's again for each case."""

from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d


class Group:
    """A process group of which only size and rank are asked."""

    def __init__(self, rank, size):
        self.rank, self.size = (lambda: rank), (lambda: size)


def end_groups(kept=()):
    """Ends all groups but the world and those `kept`. A collective: no rank leaves one that another
    still needs.

    A thread of each group of gloo wakes a hundred times a second, so that hundreds of groups keep a
    core busy.
    """
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()
    for group in [*distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD and group not in kept:
            dist.destroy_process_group(group)


@contextmanager
def program(cp, hybrid=False, tp=1, **settings):
    """On a rank of the pool: what a program does before it builds a model, and afterwards all of it
    undone.
    """
    import cp_ring.megatron
    from cp_ring import patches
    from cp_ring.megatron import program
    from cp_ring.megatron import settings as in_force
    from cp_ring.megatron.adapter.compat import known_arguments

    kept, before = (*distributed_c10d._world.pg_map,), in_force.current()
    cp_ring.megatron.enable(cpu=True, certify="off", **settings)
    try:
        from megatron.core import parallel_state, tensor_parallel

        names = {"hybrid_context_parallel": hybrid, "dynamic_context_parallel": hybrid}  # of dev
        more = known_arguments(parallel_state.initialize_model_parallel, names)
        parallel_state.initialize_model_parallel(tp, context_parallel_size=cp, **more)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield
    finally:
        end_groups(kept)
        for name in reversed(patches.applied()):
            patches.get(name).revert()
        in_force.configure(before, whole_rows=False)
        program.begin(None)
