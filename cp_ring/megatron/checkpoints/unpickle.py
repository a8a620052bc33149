"""Checkpoints are data: loading one never runs code that is stored in it.

Files and byte entries that torch.save wrote go through `torch.load` with `weights_only=True`: zip archives only, no TorchScript,
no legacy format, and our list of names instead of the list of the process. What is read with plain `pickle` goes through a
reader that finds the classes it needs and nothing else: `IndexUnpickler` for the index `.metadata`, `ExtraStateUnpickler` for
the state of fp8 that TransformerEngine's layers keep in a tensor.

All of them look an enumeration up by value. None gives a state to anything that the rest of the process shares, and none
imports a module that it does not list. Arrays of NumPy are built by `_Array` and `_DataType`, which accept plain numbers and
strings only: NumPy's own constructors would take any bytes for the addresses of objects.

`--cp-ring-trust-checkpoint` switches the gates off. A type of a user passes after `torch.serialization.add_safe_globals([Type])`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import enum
import functools
import importlib
import io
import math
import os
import pathlib
import pickle
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import files
from cp_ring.megatron.settings import current

_ADVICE = "it is not loaded; if you trust its origin, give --cp-ring-trust-checkpoint"
_ENUM_PACKAGES = ("megatron.core.", "transformer_engine.common.")


class Rejected(ConfigError, pickle.UnpicklingError):
    """A checkpoint holds something that loading must not build."""


def _rejected(what: str) -> Rejected:
    return Rejected(f"the checkpoint holds a pickle {what}, which could run code: {_ADVICE}")


# NumPy.


class _DataType:
    """Stands for `numpy.dtype` in a pickle: a data type of plain numbers or strings."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[<>=|]?[biufcSU]\d{1,9}|\?", code):
            raise _rejected(f"of the numpy data type {code!r:.60}")
        self.plain = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        """Takes the byte order from NumPy's state of a data type; everything else in it has to be what the code says."""
        own = self.plain.__reduce__()[2]
        if not isinstance(state, tuple) or len(state) != len(own) or state[1] not in ("<", ">", "=", "|") or state[2:] != own[2:]:
            raise _rejected(f"that gives a state of its own to the numpy data type {self.plain}")
        self.plain = self.plain.newbyteorder(state[1])


class _Array(np.ndarray):
    """An array as a pickle fills it: made empty by `_reconstruct`, and filled once."""

    def __new__(cls, *args: Any) -> _Array:
        if args:
            raise _rejected("that calls numpy.ndarray")
        return super().__new__(cls, 0, np.int8)

    def __setstate__(self, state: Any) -> None:
        if self.size:  # its memory, which others may see by now, would be freed
            raise _rejected("that gives a numpy array another state")
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _DataType):
            raise _rejected(f"that gives the state {state!r:.60} to a numpy array")
        _, shape, kind, column_major, data = state
        sizes = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
        if not sizes or not isinstance(data, bytes) or math.prod(shape) * kind.plain.itemsize != len(data):
            raise _rejected(f"of a numpy array of shape {shape!r:.60} with other data")
        own: Any = (1, shape, kind.plain, bool(column_major), data)
        super().__setstate__(own)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return np.asarray(self).__reduce_ex__(protocol)  # it is saved again as any array is


def _reconstruct(*_: Any) -> _Array:
    """For numpy's `_reconstruct`."""
    return _Array()


def _scalar(kind: Any, data: Any) -> Any:
    """For numpy's `scalar`."""
    if not isinstance(kind, _DataType) or not isinstance(data, bytes) or len(data) != kind.plain.itemsize:
        raise _rejected("of a numpy number with other data")
    return np.frombuffer(data, kind.plain)[0]


# Names.


def _by_value(kind: Any) -> Callable[[Any], Any]:
    """The function that stands for an enumeration in a pickle; `kind` itself could build a new class."""

    def look_up(value: Any) -> Any:
        return kind(value)

    return look_up


def _is_enumeration(kind: Any, module: str) -> bool:
    """Whether `kind` is an enumeration with members that `module` defines."""
    return isinstance(kind, enum.EnumMeta) and len(kind) > 0 and kind.__module__ == module


_NUMPY: dict[str, Any] = {
    "numpy.ndarray": _Array,
    "numpy.dtype": _DataType,
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
_PLAIN: tuple[Any, ...] = (
    *(bytes, frozenset, range, slice, argparse.Namespace, types.SimpleNamespace, collections.deque, io.BytesIO),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, torch.Generator),
)
_PATHS = {
    f"{module}.{name}": getattr(pathlib, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "PureWindowsPath")
}


@functools.lru_cache(maxsize=1)
def _enumerations(loaded: int) -> dict[str, Any]:
    """Name -> function of all enumerations that Megatron and TransformerEngine have defined; `loaded` modules are there."""
    import signal

    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_ENUM_PACKAGES) and module is not None]
    return {
        f"{module.__name__}.{kind.__qualname__}": _by_value(kind)
        for module in (signal, *modules)
        for kind in list(vars(module).values())
        if _is_enumeration(kind, module.__name__)
    }


def _name(entry: Any) -> tuple[str, Any]:
    """The name under which a pickle finds an entry of torch's list of safe globals, and the entry."""
    if isinstance(entry, tuple):
        return entry[1], entry[0]
    return f"{entry.__module__}.{entry.__qualname__}", entry


def _allowed(safe_globals: list[Any]) -> list[tuple[Any, str]]:
    """What an archive may name beside torch's own types: ours, and what Megatron, other packages and the user declared safe."""
    named = dict(map(_name, [*_PLAIN, *safe_globals])) | _PATHS
    named = {name: thing for name, thing in named.items() if not name.startswith("numpy.")} | _NUMPY
    for name, thing in named.items():
        if isinstance(thing, enum.EnumMeta):
            named[name] = _by_value(thing)
    return [(thing, name) for name, thing in (_enumerations(len(sys.modules)) | named).items()]


_lock = threading.RLock()


@contextlib.contextmanager
def _list_of(names: list[tuple[Any, str]] | None = None) -> Iterator[None]:
    """While the block runs, torch's list of safe globals is `names`, or else `_allowed`."""
    with _lock:
        before = torch.serialization.get_safe_globals()
        ours: Any = _allowed(before) if names is None else names
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(ours)
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


# Archives.

_torch_load = torch.load
_ZIP = b"PK\x03\x04"


@contextlib.contextmanager
def _opened(file: Any) -> Iterator[Any]:
    if isinstance(file, str | os.PathLike):
        with files.open_regular(file) as opened:
            yield opened
    else:
        yield file


def torch_load(file: Any, map_location: Any = None) -> Any:
    """As `torch.load` of a path or a binary file, through the gate for archives.

    Raises `Rejected`, with a message of one line, if the file is not a zip archive of torch.save or names something that is not
    allowed; `OSError` if the file cannot be read.
    """
    with _opened(file) as opened:
        start = opened.tell()
        magic = opened.read(4)
        opened.seek(start)
        if magic != _ZIP:  # where torch.load would take the file for one of its legacy formats
            raise Rejected(f"the checkpoint holds a file that is no zip archive of torch.save: {_ADVICE}")
        try:
            if "constants.pkl" in _records(opened, start):
                raise Rejected("the checkpoint holds a TorchScript archive, which is code: it is not loaded")
            with _list_of():
                return _torch_load(opened, map_location=map_location, weights_only=True)
        except (ConfigError, OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a forged archive raises nearly anything
            raise _in_one_line(error) from None


def storage_from_bytes(data: bytes) -> Any:
    """As `torch.storage._load_from_bytes`: a storage within a pickled tensor, which torch still writes in its legacy format.

    Torch's `weights_only` loader reads that format too, here with torch's own names alone: no type of Megatron or of a user.
    """
    if data[:4] == _ZIP:
        return torch_load(io.BytesIO(data))
    with _list_of([]):
        try:
            return _torch_load(io.BytesIO(data), weights_only=True)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # forged data raises nearly anything
            raise _in_one_line(error) from None


def _records(file: Any, start: int) -> list[str]:
    """The names of all records of an archive as torch itself reads it; Python's zipfile may see others."""
    try:
        names: list[str] = torch._C.PyTorchFileReader(file).get_all_records()
        return names
    finally:
        file.seek(start)


def _in_one_line(error: Exception) -> Rejected:
    found = re.search(r"GLOBAL (\S+)", str(error))
    if found:  # torch leaves the name of the module builtins out
        return _rejected(f"of {found[1] if '.' in found[1] else 'builtins.' + found[1]}")
    torch_reason = re.search(r"WeightsUnpickler error: (.+)", str(error))
    why = torch_reason[1] if torch_reason else (str(error).strip().splitlines() or [""])[0]
    return Rejected(f"the checkpoint holds an archive that cannot be loaded ({type(error).__name__}: {why:.200}): {_ADVICE}")


# The index.

_DCP = "torch.distributed.checkpoint."
_INDEX: dict[str, frozenset[str]] = {
    module: frozenset(names.split())
    for module, names in {
        "builtins": "set frozenset slice",
        "collections": "OrderedDict",
        "pathlib": "PosixPath PurePosixPath",
        "torch": "Size device",
        "torch.serialization": "_get_layout",
        _DCP + "metadata": "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
        "TensorProperties _MEM_FORMAT_ENCODING StorageMeta",
        _DCP + "filesystem": "_StorageInfo _StoragePrefix",
        _DCP + "planner": "SavePlan WriteItem WriteItemType TensorWriteData",
        "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    }.items()
}
_EXTRA_STATE: dict[str, frozenset[str]] = {
    module: frozenset(names.split())
    for module, names in {
        "collections": "OrderedDict",
        "torch": "Size",
        "torch._utils": "_rebuild_tensor_v2",
        "torch.storage": "UntypedStorage _load_from_bytes",
        "megatron.core.safe_globals": "safe_load_from_bytes",
        "megatron.core.extensions.transformer_engine": "TEDelayedScaling",
        "transformer_engine.common.recipe": "DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling "
        "NVFP4BlockScaling Format _FormatHelper MMParams QParams",
        "numpy": "ndarray dtype",
        "numpy._core.multiarray": "_reconstruct",
        "numpy.core.multiarray": "_reconstruct",
    }.items()
}
_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)  # they pickle by name: torch.bfloat16
_OPCODES = {
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP, pickle.MEMOIZE),
    *(pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.GET, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.INT, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG),
    *(pickle.LONG1, pickle.LONG4, pickle.FLOAT, pickle.BINFLOAT, pickle.UNICODE, pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.BINUNICODE8, pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8, pickle.EMPTY_TUPLE, pickle.TUPLE),
    *(pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
}


_PythonUnpickler: Any = pickle._Unpickler


class _Gate(_PythonUnpickler):
    """`pickle.Unpickler` that finds `names` only, module by module, and gives a state to instances of classes among them.

    In Python, since the one in C lets nobody see which object is given which state: 7 s instead of 3 s for 100,000 tensors.
    """

    names: dict[str, frozenset[str]]

    def load_build(self) -> None:
        """Gives an object its state."""
        target: Any = self.stack[-2]
        kind = type(target)
        listed = kind.__name__ in self.names.get(kind.__module__, ()) or kind in (_Array, _DataType)
        if not listed or isinstance(target, enum.Enum):
            raise _rejected(f"that gives a state to {target!r:.60}")
        super().load_build()

    dispatch = {code[0]: _PythonUnpickler.dispatch[code[0]] for code in _OPCODES} | {pickle.BUILD[0]: load_build}

    def find_class(self, module: str, name: str) -> Any:
        """The object of that name; raises `Rejected` unless it is listed."""
        if module == "pathlib._local":  # where Python 3.13 alone defines them
            module = "pathlib"
        if name in self.names.get(module, ()):
            found = _NUMPY.get(f"{module}.{name}") or getattr(importlib.import_module(module), name, None)
            if found is not None:
                return _by_value(found) if isinstance(found, enum.EnumMeta) else found
        elif module == "torch" and isinstance(getattr(torch, name, None), _TORCH_VALUES):
            return getattr(torch, name)
        raise _rejected(f"of {module}.{name}")

    def read(self) -> Any:
        """As `load`; raises `Rejected` for an instruction that neither an index nor an extra state has."""
        try:
            return self.load()
        except KeyError as error:  # also a reference to nothing
            raise _rejected(f"with the instruction {error.args[0]!r:.20}") from None


class IndexUnpickler(_Gate):
    """Reads `.metadata` of a distributed checkpoint, and no other pickle."""

    names = _INDEX


class ExtraStateUnpickler(_Gate):
    """Reads the extra state of TransformerEngine's layers: scaling factors and the recipe of fp8, pickled into a tensor.

    Its names are those of Megatron's own `SafeUnpickler` (0.19), which NumPy's constructors could lead astray.
    """

    names = _EXTRA_STATE

    def find_class(self, module: str, name: str) -> Any:
        """As that of `_Gate`; storages go through `storage_from_bytes`."""
        if name in ("_load_from_bytes", "safe_load_from_bytes") and name in self.names.get(module, ()):
            return storage_from_bytes
        return super().find_class(module, name)


def load_index(file: Any) -> Any:
    """As `pickle.load` of an open `.metadata`; raises `Rejected` where it is anything else."""
    return IndexUnpickler(file).read()


class PickleOfIndex:
    """Stands for the module `pickle` where torch reads `.metadata`: only `load` differs, unless checkpoints are trusted."""

    def __getattr__(self, name: str) -> Any:
        if current().trust_checkpoint:
            return getattr(pickle, name)
        if name in ("loads", "Unpickler"):
            raise AttributeError(f"{name} is out of reach while checkpoints are not trusted")
        return load_index if name == "load" else getattr(pickle, name)


# While a checkpoint loads.

_depth = 0


@contextlib.contextmanager
def restricted() -> Iterator[None]:
    """While the block runs, `torch.load` and `torch.jit.load` in this process are gated, unless checkpoints are trusted."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def _gated() -> bool:
    return _depth > 0 and not current().trust_checkpoint


def gated_torch_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` that goes through the gate within `restricted()`, and as it was outside."""

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _gated():
            return torch_load(f, map_location)
        return original(f, map_location, *args, **kwargs)

    return load


def gated_jit_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.jit.load` that raises `Rejected` within `restricted()`, and as it was outside."""

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        if _gated():
            raise Rejected("the checkpoint holds a TorchScript archive, which is code: it is not loaded")
        return original(*args, **kwargs)

    return load


def gated_storage(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.storage._load_from_bytes` that is `storage_from_bytes` within `restricted()`, and as it was outside."""

    @functools.wraps(original)
    def load(b: bytes) -> Any:
        return storage_from_bytes(b) if _gated() else original(b)

    return load


class PickleOfExtraState:
    """Stands for the module `pickle` in modules that read extra states: `loads` is gated within `restricted()`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)

    def loads(self, data: bytes, **options: Any) -> Any:
        return ExtraStateUnpickler(io.BytesIO(data)).read() if _gated() else pickle.loads(data, **options)
