"""Which memory each of torch's operators reads and writes, for the log of the fake GPU.

The libraries see kernels and streams, but not which of a kernel's arguments are read and written.
The dispatcher of torch knows it: its schemas say what an operator changes.
"""

import ctypes
import importlib.util
import sys
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import BuiltinFunctionType
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They allocate and write nothing.
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


_PROCESS = ctypes.CDLL(None)  # with the fake libraries, where they are loaded


def note(text):
    """Writes a line to the log."""
    _PROCESS.fakegpu_note(text.encode())


def mark(name):
    """Begins the part of the log with this name."""
    note(f"mark {name}")


class Accesses(TorchDispatchMode):
    """In the block, the log has what operators read and write: "access <stream> <name> n|r|w:<first
    byte>:<end> ...", where n is for new memory.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if func.is_view or func.namespace == "c10d" or name == "record_stream":
            return out
        written = []
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                written += _on_device(value)
        given, changed = _on_device((args, kwargs)), {id(x) for x in written}
        read = [x for x in given if id(x) not in changed]
        old = {x.untyped_storage().data_ptr() for x in given}
        made = [x for x in _on_device(out) if x.untyped_storage().data_ptr() not in old]
        # what is made empty takes a shape and a device of others, and reads and writes nothing
        touched = ([], written) if name in _EMPTY else (read, written + made)
        _write(name, made, *touched)
        return out


@contextmanager
def recorded():
    """In the block, accesses of torch's operators and of Triton's functions are in the log."""
    try:
        from triton.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction
    except ImportError:
        with Accesses():
            yield
        return
    run, launcher = JITFunction.run, CompiledKernel.__getitem__

    # a schema of these does not exist: they may write whatever they are given
    def launch(self, *args, **kwargs):
        done = run(self, *args, **kwargs)
        _write(self.__name__, [], [], _on_device((args, kwargs)))
        return done

    def launch_again(self, grid):
        def launched(*args):
            launcher(self, grid)(*args)
            _write(self.name, [], [], _on_device(args))

        return launched

    with (
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(CompiledKernel, "__getitem__", launch_again),
        _of_transformer_engine(),
        Accesses(),
    ):
        yield


@contextmanager
def _of_transformer_engine():
    """In the block, the log has what functions of its extension read and write, for which torch has
    no schema: they read what they are given, and write what they return.
    """
    if importlib.util.find_spec("transformer_engine"):
        importlib.import_module("transformer_engine.pytorch")  # it loads the extension
    extension = sys.modules.get("transformer_engine_torch")
    with ExitStack() as stack:
        for name, function in list(vars(extension).items()) if extension else ():
            if isinstance(function, BuiltinFunctionType):
                stack.enter_context(mock.patch.object(extension, name, _told(name, function)))
        yield


def _told(name, function):
    @wraps(function)
    def call(*args, **kwargs):
        out = function(*args, **kwargs)
        given = _on_device((args, kwargs))
        old = {x.untyped_storage().data_ptr() for x in given}
        made = [x for x in _on_device(out) if x.untyped_storage().data_ptr() not in old]
        _write(name, made, given, made)
        return out

    return call


def _on_device(value):
    return [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_cuda and x.numel()]


def _write(name, made, read, written):
    new = [x.untyped_storage() for x in made]
    parts = [f"n:{x.data_ptr()}:{x.data_ptr() + x.nbytes()}" for x in new]
    parts += [f"r:{_bytes(x)}" for x in read] + [f"w:{_bytes(x)}" for x in written]
    if parts:
        handle = torch.cuda.current_stream().cuda_stream
        stream = (handle - 0x1000) // 16 if handle >= 0x1000 else 0  # as fake.h
        note(f"access {stream} {name} {' '.join(parts)}")


def _bytes(x):
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return f"{x.data_ptr()}:{x.data_ptr() + (last + 1) * x.element_size()}"
