"""Which calls of real plans the kernels support on which GPU, forward and backward, by the real
libraries: a row a call, a column a device.

python -m tests.fakegpu.kernel_calls [VERSION [CUDNN]]     with these versions of TransformerEngine
and cuDNN; prints what `docs/kernels.md` sums up
"""

import os
import sys
from functools import partial
from itertools import accumulate

import torch

from cp_ring.errors import one_line
from cp_ring.kernels import choose, te_library
from cp_ring.kernels.base import OPEN, Packing
from cp_ring.kernels.flash_aten import FlashAtenKernel
from tests.fakegpu.accesses import mark
from tests.fakegpu.process import FakeGpus
from tests.fakegpu.te_build import VERSION

DEVICES = {80: "A100", 90: "H100", 100: "B200"}
KERNELS = ("transformer_engine", "auto")
HEADS = (32, 8, 128, 128)
DOCUMENTS = [1024, 3000, 40, 4128]  # 8,192 tokens
# Queries and keys of a tile (hi 0 is causal) or packed documents, and heads h, g and sizes d, e.
CASES = {
    "8,192 x 4,096": {"tile": (8192, 4096), "hi": OPEN},
    "2,304 x 5,888": {"tile": (2304, 5888), "hi": OPEN},
    "4,096 causal": {"tile": (4096, 4096)},
    "8,192 x 2,432 causal": {"tile": (8192, 2432)},
    "4,096 causal, deterministic": {"tile": (4096, 4096), "deterministic": True},
    "4,001 x 4,097": {"tile": (4001, 4097), "hi": OPEN},
    "one query, 4,096 keys": {"tile": (1, 4096), "hi": OPEN},
    "packed": {"documents": DOCUMENTS},
    "packed, deterministic": {"documents": DOCUMENTS, "deterministic": True},
    "heads of 64": {"tile": (4096, 4096), "sizes": (32, 8, 64, 64)},
    "heads of 100": {"tile": (4096, 4096), "sizes": (32, 8, 100, 100)},
    "heads of 256": {"tile": (4096, 4096), "sizes": (16, 4, 256, 256)},
    "heads of 256, deterministic": {
        "tile": (4096, 4096),
        "sizes": (16, 4, 256, 256),
        "deterministic": True,
    },
    "packed, heads of 256": {"documents": DOCUMENTS, "sizes": (16, 4, 256, 256)},
    "heads of 512": {"tile": (4096, 4096), "sizes": (16, 4, 512, 512)},
    "heads of 512, deterministic": {
        "tile": (4001, 4097),
        "hi": OPEN,
        "sizes": (16, 4, 512, 512),
        "deterministic": True,
    },
    "packed, heads of 512": {"documents": DOCUMENTS, "sizes": (16, 4, 512, 512)},
    "heads of 192 and 128": {"tile": (4096, 4096), "sizes": (32, 32, 192, 128)},
    "192 and 128, fewer keys": {"tile": (4096, 1152), "sizes": (32, 32, 192, 128)},
    "packed, 192 and 128": {"documents": DOCUMENTS, "sizes": (32, 32, 192, 128)},
}


def calls(kernels, cases, planted=False, variables=None):
    """Runs on a fake GPU. Of each kernel and case, forward and backward are the parts "<kernel>
    <case> forward" and "... backward" of the log; where the kernel rejects the case or fails, "<kernel>
    <case> rejected: <why>" comes last. planted: `flash_aten` rejects nothing, and
    `transformer_engine` has no faulty versions. variables: of the environment.
    """
    os.environ.update(variables or {})
    if planted:
        FlashAtenKernel.rejection = lambda *_: None
        te_library.fault_of = lambda *_: None
    for name, case in cases.items():
        for kernel in kernels:
            try:
                torch.use_deterministic_algorithms(case.get("deterministic", False))
                _call(kernel, f"{kernel} {name}", **case)
            except Exception as error:
                mark(f"{kernel} {name} rejected: {one_line(error)}")
    mark("end")


def _call(name, part, tile=(0, 0), documents=None, sizes=HEADS, hi=0, deterministic=False):
    h, g, d, e = sizes
    device, dtype = torch.device("cuda"), torch.bfloat16
    kernel = choose(name, device=device, dtype=dtype, d=d, e=e, packed=documents is not None)
    make = partial(torch.empty, device=device, dtype=dtype)
    if documents is not None and kernel.capabilities.varlen:
        ends = torch.tensor([0, *accumulate(documents)], dtype=torch.int32).to(device)
        packing = Packing(ends, ends, max(documents), max(documents), -1, 0)
        q, k, v = (make(sum(documents), *shape) for shape in ((h, d), (g, d), (g, e)))
        mark(f"{part} forward")
        out, lse = kernel.forward_varlen(q, k, v, packing, 0.1)
        mark(f"{part} backward")
        kernel.backward_varlen(torch.empty_like(out), q, k, v, out, lse, packing, 0.1)
        return
    for queries, keys in [tile] if documents is None else zip(documents, documents, strict=True):
        shapes = ((queries, h, d), (keys, g, d), (keys, g, e))
        q, k, v = (make(1, *shape) for shape in shapes)
        band = {"lo": -OPEN, "hi": hi, "scale": 0.1}
        mark(f"{part} forward")
        out, lse = kernel.forward(q, k, v, **band)
        mark(f"{part} backward")
        kernel.backward(torch.empty_like(out), q, k, v, out, lse, **band)


def verdict(log, kernel, case, least=64 << 20):
    """What runs, forward and backward, with the workspace of a call from `least` bytes on:
    "cuDNN", "flash", "efficient", "products" of matrices; "no" where the kernel rejects the call.
    """
    if any(event.part.startswith(f"{kernel} {case} rejected: ") for event in log.events):
        return "no"
    kinds, space = [], 0
    for way in ("forward", "backward"):
        names = [each.name for each in log.kernels(f"{kernel} {case} {way}")]
        used = [int(name.split("=")[1]) for name in names if name.startswith("cudnn")]
        space = max([space, *used])
        known = {"flash": "flash", "fmha_cutlass": "efficient"}
        other = (kind for part, kind in known.items() if any(part in name for name in names))
        kinds.append("cuDNN" if used else next(other, "products"))
    size = f" {space / 2**20:,.0f} MiB" if space >= least else ""
    return ", then ".join(dict.fromkeys(kinds)) + size


def main(version=VERSION, cudnn=None):
    gpus = FakeGpus(version, cudnn)
    arguments = {"kernels": KERNELS, "cases": CASES}
    logs = {
        sm: gpus.run("tests.fakegpu.kernel_calls:calls", 1, sm, **arguments)[0] for sm in DEVICES
    }
    gpus.close()
    head = [f"{name}: `{kernel}`" for name in DEVICES.values() for kernel in KERNELS]
    print(f"| call | {' | '.join(head)} |\n{'|---' * (len(head) + 1)}|")
    for case in CASES:
        cells = [verdict(log, kernel, case) for log in logs.values() for kernel in KERNELS]
        print(f"| {case} | {' | '.join(cells)} |")
    for sm, log in logs.items():
        parts = dict.fromkeys(event.part for event in log.events if " rejected: " in event.part)
        for part in parts:
            print(f"{DEVICES[sm]}: {part}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
