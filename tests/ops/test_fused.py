"""Triton functions: the fallback where they cannot be compiled, and the arguments that must not
cause another compilation.
"""

import importlib.util
import logging
import sys
import types

import numpy as np
import pytest
import torch

from cp_ring.ops.fused import FusedFunction
from cp_ring.ops.segments import Segments


@pytest.fixture
def function(monkeypatch):
    """Stands for a Triton function. A launch raises `module.raises`, if set; `module.launches`
    counts the launches.
    """
    module = types.ModuleType("tests_fused_module")
    module.raises, module.launches = None, 0

    def run(*args):
        module.launches += 1
        if module.raises:
            raise module.raises

    module.run = run
    monkeypatch.setitem(sys.modules, "tests_fused_module", module)
    return FusedFunction("tests_fused_module", "run"), module


def test_without_compiler_torch_operations_run_and_it_is_said_once(function, caplog):
    """Triton raises at the first launch, not at import."""
    first, module = function
    second = FusedFunction("tests_fused_module", "run")
    module.raises = RuntimeError(
        "Failed to find C compiler.\nPlease specify via CC environment variable."
    )
    with caplog.at_level(logging.WARNING, "cp_ring.ops"):
        assert [first.run(), first.run(), second.run()] == [False, False, False]
    assert module.launches == 2, "each function is tried once"
    assert [record.message for record in caplog.records] == [
        "Triton cannot compile (Failed to find C compiler. Please specify via CC environment "
        "variable.): merges and sums of gradients use torch operations, which are slower"
    ]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.OutOfMemoryError("out of memory"),
        MemoryError(),
    ],
)
def test_memory_that_is_short_is_an_error_and_does_not_turn_triton_off(function, error):
    first, module = function
    module.raises = error
    with pytest.raises(type(error)):
        first.run()
    module.raises = None
    assert first.run()


def test_an_error_of_this_package_is_no_reason_to_run_without_triton(function):
    first, module = function
    names = {"__name__": "cp_ring.ops.planted"}
    exec("def run():\n    return [][0]", names)
    module.run = names["run"]
    with pytest.raises(IndexError):
        first.run()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", ["merge", "add"])
@pytest.mark.parametrize("parts", [1, 4])
def test_numbers_of_tokens_cause_no_new_compilation(monkeypatch, name, parts):
    """Sizes and strides of heads are specialized, because they decide how memory is read; token
    counts are not, nor the strides of lse, which depend on them.
    """
    first = specialization(monkeypatch, name, parts, tokens=100)
    for tokens in (1, 16, 101, 4096):
        assert specialization(monkeypatch, name, parts, tokens) == first
    assert specialization(monkeypatch, name, parts, 100, size=72) != first


def specialization(monkeypatch, name, parts, tokens, size=128):
    """What Triton compiles a launch for."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    from cp_ring.ops import merge_triton, sums_triton

    module = {"merge": merge_triton, "add": sums_triton}[name]
    kernel, found = getattr(module, f"_{name}"), []
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    class Launched:
        def __getitem__(self, grid):
            return lambda *given, **named: found.append(bind(*given, **named)[1])

    monkeypatch.setattr(module, f"_{name}", Launched())
    segments = Segments(
        np.array([[0, tokens, 0, 1, *[0, 1] * parts]]).T, kept=slice(tokens // 2, 0)
    )
    out = torch.empty(1, tokens, 4, size, dtype=torch.bfloat16)
    lse = torch.empty(1, tokens, 4).transpose(1, 2)  # as kernels of packed documents return it
    if name == "merge":
        module.merge(segments, [out] * parts, [lse] * parts, out.float(), lse.contiguous(), out)
    else:
        module.add(segments, [[out]] * parts, [out.float()], [out], 1)
    monkeypatch.undo()
    return found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "change, looks",
    [
        ({}, 1),
        ({"tokens": 7}, 1),
        ({"heads": 4}, 2),
        ({"PARTS": 2}, 2),
        ({"dtype": torch.float16}, 2),
        ({"other": torch.float64}, 2),
        # two each: these are not kept
        ({"size": 72}, 3),
        ({"first": 1}, 3),
        ({"other_first": 1}, 3),
        ({"numbers": 2**31}, 3),
    ],
)
def test_a_kernel_is_launched_again_only_for_what_it_was_compiled_for(monkeypatch, change, looks):
    from cp_ring.ops import blocks_triton
    from cp_ring.ops.blocks_triton import launch, tokens_of

    # functions of other tests are gone, and one in their place would be taken for them
    monkeypatch.setattr(blocks_triton, "_compiled", {})

    class Kernel:
        """A Triton function, and what it is compiled to."""

        def __init__(self, again):
            self.again, self.given = again, []

        def __getitem__(self, grid):
            def launched(*args, **constants):
                self.given.append((grid, args[-1], *constants))
                return self.again

            return launched

    compiled = Kernel(None)
    function = Kernel(compiled)

    def call(tokens=100, heads=8, size=128, first=0, other_first=0, numbers=5,
             dtype=torch.bfloat16, other=torch.float32, **constants):  # fmt: skip
        x = torch.empty(1, tokens, heads, size + first, dtype=dtype)[..., first:]
        lse = torch.empty(101, dtype=other)[other_first:]
        launch(function, (tokens, 1, 1), (x, lse, heads), [tokens_of(x, 1)], [lse], numbers,
               **{"PARTS": 1} | constants)  # fmt: skip
        return tokens, 1, 1

    call()
    grids = [call(**change) for _ in range(2)]
    again = 3 - looks
    assert len(function.given) == looks and len(compiled.given) == again
    # the constants come last, by their place
    assert compiled.given[:again] == [(grid, change.get("PARTS", 1)) for grid in grids[2 - again :]]
