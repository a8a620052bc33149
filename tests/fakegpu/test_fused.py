"""The Triton kernels of merges and sums as the GPU would get them: registers, spills, and the width
of their loads, by Triton's compiler and its assembler.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import triton

REGISTERS = 168  # by eights: 3 blocks of 128 threads on a processor of 65,536


class Code(NamedTuple):
    registers: int
    spilled: int  # bytes
    widths: set[int]  # bits of loads and stores of tensors in global memory, but for lse and tables


def compiled(gpus, folder, sm, sizes, **faults):
    """Of all variants."""
    gpus.run("tests.fakegpu.programs:fused", 1, sm, folder=str(folder), sizes=sizes,
             dtypes=["bfloat16"], **faults)  # fmt: skip
    return [_assembled(path, sm) for path in sorted(folder.iterdir())]


def _assembled(path, sm):
    text = path.read_text()
    (target,) = re.findall(r"\.target (sm_\w+)", text)
    assembler = "ptxas-blackwell" if sm >= 100 else "ptxas"
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    done = subprocess.run(
        [folder / assembler, "-v", f"--gpu-name={target}", path, "-o", "/dev/null"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    found = re.findall(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.b(\d+) ", text)
    # lse and the table are numbers of 32 bits, one for a token
    widths = {int(count or 1) * int(bits) for count, bits in found} - {32}
    return Code(int(registers), spilled, widths)


@pytest.mark.ci
@pytest.mark.parametrize(
    "sm, sizes",
    [
        (90, [128]),
        *(
            pytest.param(sm, [64, 96, 128, 192, 256], marks=pytest.mark.slow)
            for sm in (80, 90, 100)
        ),
    ],
)
def test_no_kernel_spills_and_tensors_move_in_128_bits(gpus, tmp_path, sm, sizes):
    for code in compiled(gpus, tmp_path, sm, sizes):
        assert not code.spilled and code.registers <= REGISTERS and code.widths == {128}


@pytest.mark.slow
def test_spills_and_narrow_loads_are_seen(gpus, tmp_path):
    for name in ("spills", "narrow"):
        (tmp_path / name).mkdir()
    few = compiled(gpus, tmp_path / "spills", 90, [128], registers=24)
    assert all(code.spilled for code in few)
    narrow = compiled(gpus, tmp_path / "narrow", 90, [128], skipped=1)
    assert all(min(code.widths) < 128 for code in narrow)
