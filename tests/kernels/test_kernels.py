"""The choice of a kernel. tests/testing has the kernels on tiles."""

import importlib

import pytest
import torch

from cp_ring.errors import KernelError
from cp_ring.kernels import REGISTRY, choose
from cp_ring.plan.lower import ASSUMED

CPU = torch.device("cpu")


def test_auto_takes_the_fastest_that_can():
    for dtype in (torch.float32, torch.float16):
        assert choose("auto", device=CPU, dtype=dtype, d=8, e=8).name == "cpu"


def test_explicit_choice_is_never_replaced():
    with pytest.raises(
        KernelError, match=r"kernel='cpu': cpu runs on the CPU, the tensors are on cuda"
    ):
        choose("cpu", device=torch.device("cuda"), dtype=torch.float32, d=8, e=8)
    with pytest.raises(
        KernelError,
        match=r"kernel='auto': .*cpu does not know torch.int64; reference reads floating",
    ):
        choose("auto", device=CPU, dtype=torch.int64, d=8, e=8)


@pytest.mark.parametrize("name", ["flash", "flash_aten"])
def test_predictions_assume_what_flash_attn_can(name):
    assert importlib.import_module(REGISTRY[name]).KERNEL.capabilities == ASSUMED


def test_choice_is_said_once(caplog):
    with caplog.at_level("INFO", logger="cp_ring.kernels"):
        for _ in range(3):
            choose("auto", device=CPU, dtype=torch.float32, d=13, e=11)
    assert [record.message for record in caplog.records] == [
        "attention kernel: cpu (auto; on cpu, torch.float32, head sizes 13 and 11)"
    ]
