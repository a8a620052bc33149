"""`cp_ring.pretrain_gpt` with several ranks on one GPU over gloo.

Megatron binds process groups and barriers to a device, which gloo does not know: these parameters
are left out. Nor does it bind the process to cores, for which fine-grained offloading would ask the
driver.
"""

import sys
from contextlib import nullcontext

import torch.distributed as dist

from cp_ring import pretrain_gpt
from tests.gpu import over_host


def without(function, name):
    def call(*args, **kwargs):
        return function(*args, **{key: value for key, value in kwargs.items() if key != name})

    return call


if __name__ == "__main__":
    dist.init_process_group = without(dist.init_process_group, "device_id")
    dist.barrier = without(dist.barrier, "device_ids")
    if "nccl" not in sys.argv:
        from megatron.core.distributed import param_and_grad_buffer

        over_host.use()
        # gloo reduces tensors on a GPU one by one alone
        param_and_grad_buffer._coalescing_manager = lambda *_, **__: nullcontext()
    if "--fine-grained-activation-offloading" in sys.argv:
        from megatron.core.pipeline_parallel import utils

        utils.set_ideal_affinity_for_current_gpu = lambda: None
    pretrain_gpt.main()
