"""pretrain_gpt of cp_ring with Megatron's fine-grained activation offloading, whose flags Megatron
accepts with CUDA alone.

Each rank ends with a line of the bytes that it moved to host memory.
"""

import sys

from cp_ring.patches.install import install

install(sys.argv[1:])  # the CPU runtime, before Megatron is imported

from megatron.training import argument_utils  # noqa: E402

from cp_ring import pretrain_gpt  # noqa: E402
from tests.megatron import host_memory  # noqa: E402

make_config = argument_utils.core_transformer_config_from_args


def offloading_config(*args, **kwargs):
    config = make_config(*args, **kwargs)
    for name, value in host_memory.SETTINGS.items():
        setattr(config, name, value)
    return config


if __name__ == "__main__":
    argument_utils.core_transformer_config_from_args = offloading_config
    with host_memory.fine_grained() as offloading:
        pretrain_gpt.main()
        # ranks share a log: one write
        sys.stdout.write(f"moved {sum(host_memory.moved_bytes(offloading).values())}\n")
        sys.stdout.flush()
