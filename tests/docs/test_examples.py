"""Each program of docs/examples does what its page says; the programs assert their results
themselves.
"""

import functools
import importlib
import re
import sys

import pytest
import torch
import torch.distributed as dist

from cp_ring.kernels.cpu import KERNEL
from launch.budget import ROOT
from tests.megatron.launch import launch

EXAMPLES = ROOT / "docs" / "examples"
ON_TWO_RANKS = ("ring_attention", "packed_documents", "hugging_face")
ON_FOUR_RANKS = ("grpo", "device_mesh", "hugging_face_trainer")
# tests/megatron/test_declared_masks.py runs them
IN_MEGATRON = ("rl_shared_prefix", "multimodal_spans")
ON_ONE = ("own_mask", "own_kernel")


def example(name):
    return importlib.import_module(f"docs.examples.{name}")


def run_main(group, name):
    rank, size = dist.get_rank(), dist.get_world_size()
    # as torchrun tells transformers' Trainer
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in told.items():
            patch.setenv(variable, str(value))
        return example(name).main(group)


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_on_two_ranks(pool, name):
    first, second = pool.run(run_main, 2, name)
    assert first == second  # each returns a result that both ranks must agree on


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_on_four_ranks(pool, name):
    first, *others = pool.run(run_main, 4, name)
    assert others == [first] * 3


@pytest.mark.parametrize("name", ON_ONE)
def test_in_one_process(registries, name):
    example(name).main()


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU runtime is inert where CUDA is present"
)
def test_megatron_layer(applied, monkeypatch):
    """Its attention takes the way to the kernel that docs/architecture.md lists, frame by frame."""
    ways, stock = [], KERNEL.forward

    @functools.wraps(stock)
    def forward(*args, **kwargs):
        ways.append(frames(sys._getframe(1)))
        return stock(*args, **kwargs)

    monkeypatch.setattr(KERNEL, "forward", forward)
    applied("cpu_runtime")
    assert example("megatron_layer").main() == "RingDotProductAttention"
    page = (EXAMPLES.parent / "architecture.md").read_text()
    listed = re.search(
        r"^```text\n(RingDotProductAttention\.forward\n.*?)^```", page, re.MULTILINE | re.DOTALL
    )
    assert ways and [*ways[0], "CpuKernel.forward"] == listed[1].split()


def frames(frame):
    """Names of the functions from the core attention of Megatron's layer to `frame`, without
    torch's own.
    """
    names = []
    while frame is not None:
        if not frame.f_code.co_filename.endswith(
            ("torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/autograd/function.py")
        ):
            names.append(frame.f_code.co_qualname)
        if names[-1:] == ["RingDotProductAttention.forward"]:
            return names[::-1]
        frame = frame.f_back
    raise AssertionError(f"not called by RingDotProductAttention: {names}")


@pytest.mark.ci
def test_the_first_program_by_torchrun():
    """The program that README.md shows, started as README.md says."""
    done = launch(2, [str(EXAMPLES / "ring_attention.py")])
    assert done.returncode == 0, done.stdout
    for rank in (0, 1):
        assert f"rank {rank}: 512 tokens, relative error" in done.stdout


def test_all_examples_are_run_and_short():
    files = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert set(files) == {
        *ON_TWO_RANKS,
        *ON_ONE,
        *IN_MEGATRON,
        *ON_FOUR_RANKS,
        "megatron_layer",
        "megatron_core",
    }
    # tests/megatron/test_program.py runs megatron_core
    limits = {**dict.fromkeys(IN_MEGATRON, 133), **dict.fromkeys(ON_FOUR_RANKS, 90)}
    limits |= {"megatron_core": 120}
    for name, path in files.items():
        assert len(path.read_text().splitlines()) <= limits.get(name, 77), path.name
