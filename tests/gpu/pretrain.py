"""`cp_ring.pretrain_gpt` with several ranks on one GPU over gloo.

Megatron binds process groups and barriers to a device, which gloo does not know: these parameters are left out.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from cp_ring import pretrain_gpt


def without(function: Any, name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{key: value for key, value in kwargs.items() if key != name})

    return call


if __name__ == "__main__":
    dist.init_process_group = without(dist.init_process_group, "device_id")
    dist.barrier = without(dist.barrier, "device_ids")
    pretrain_gpt.main()
