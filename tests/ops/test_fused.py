"""Triton functions: the fallback where they cannot be compiled, and the arguments that must not
cause another compilation.
"""

import importlib.util
import logging
import sys
import types

import pytest
import torch

from cp_ring.ops.fused import FusedFunction


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


def test_faults_of_the_device_are_errors(function):
    first, module = function
    module.raises = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        first.run()


@pytest.mark.parametrize(
    "error", [RuntimeError("Triton Error [CUDA]: out of memory"), MemoryError()]
)
def test_memory_that_is_short_is_an_error_and_does_not_turn_triton_off(function, error):
    first, module = function
    module.raises = error
    with pytest.raises(type(error)):
        first.run()
    module.raises = None
    assert first.run()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_numbers_of_tokens_cause_no_new_compilation():
    """Sizes and strides of heads are specialized, because they decide how memory is read; token
    counts are not.
    """
    from cp_ring.ops import merge_triton, sums_triton

    strides = {f"lse_{what}{part}" for what in "bh" for part in ("", 0, 1, 2, 3)}
    assert unspecialized(merge_triton._merge) == {"kept", *strides}
    assert unspecialized(sums_triton._add) == {"kept"}


def unspecialized(function):
    return {parameter.name for parameter in function.params if parameter.do_not_specialize}
