"""The first line of the results: the machine and the software. `python -m tests.gpu.facts DEVICE`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys

import torch

from cp_ring.tools.bench import facts

if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no CUDA device; --device fake runs the steps on a fake one")
    found = {"device": sys.argv[1], **facts(), "cuda": torch.version.cuda}
    found |= {"gpu": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
    found |= {
        "nccl": torch.cuda.nccl.version(),
        "driver_memory": torch.cuda.get_device_properties(0).total_memory,
        "capability": torch.cuda.get_device_capability(),
        # Triton compiles its launchers with a C compiler.
        "triton": importlib.util.find_spec("triton") is not None,
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
    }
    print(json.dumps(found))
