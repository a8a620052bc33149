"""Checkpoints are data: loading one never runs code that is stored in it.

Every pickle goes through a reader of our own, `_Gate`. It finds the names of one table, and each
`Allowed` of it says which arguments its name takes and which state its objects take; torch's own
list for `weights_only`, and what libraries declare safe, add nothing. A name never becomes the
class or function itself while a pickle is read, so nothing in a pickle can call it or hand it on. A
state is given once, and only to an object that the same load has made; members of enumerations are
looked up by value.

- `torch_load`: zip archives of torch.save; no TorchScript, no file in the legacy format.
- `IndexUnpickler`: the index `.metadata`.
- `ExtraStateUnpickler`: the state of fp8 that TransformerEngine's layers keep in a tensor.

`--cp-ring-trust-checkpoint` switches the gates off. A type of a user passes after
`torch.serialization.add_safe_globals([Type])`.
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
import types
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import files, process_state
from cp_ring.megatron.settings import current
from cp_ring.megatron.wrapping import Function, around

_ADVICE = "it is not loaded; if you trust its origin, give --cp-ring-trust-checkpoint"


class Rejected(ConfigError, pickle.UnpicklingError):
    """A checkpoint holds something that loading must not build."""


def _rejected(what: str) -> Rejected:
    return Rejected(f"the checkpoint holds a pickle {what}, which could run code: {_ADVICE}")


# Entries: what a pickle may do with a name.

Check = Callable[[Any], bool]


@dataclass(frozen=True, eq=False, repr=False)
class Allowed:
    """Stands for a name while a pickle is read.

    Attributes:
        name: the name as pickles have it.
        make: called with arguments that pass `takes`; None for a name that is only handed to other
        entries.
        takes: a check of each argument; the last ones may be missing, `least` must be there. None
        lets any arguments pass.
        fill: called with an object that `make` has made in this load, and its state; None where it
        takes none.
        new: makes the object where the pickle leaves `__init__` out; None where `make` does.
    """

    name: str
    make: Callable[..., Any] | None = None
    takes: tuple[Check, ...] | None = ()
    least: int = 0
    fill: Callable[[Any, Any], None] | None = None
    new: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return self.name

    def call(self, args: Any, new: bool = False) -> Any:
        """The object of these arguments; raises `Rejected` where it does not take them."""
        make = self.new or self.make if new else self.make
        if make is None or type(args) is not tuple or not self._accepts(args):
            raise _rejected(f"that calls {self.name} with {args!r:.60}")
        return make(*args)

    def _accepts(self, args: tuple[Any, ...]) -> bool:
        if self.takes is None:
            return True
        return self.least <= len(args) <= len(self.takes) and all(map(_passes, self.takes, args))


def _passes(check: Check, value: Any) -> bool:
    return check(value)


def _of(*kinds: type) -> Check:
    return lambda value: type(value) in kinds


def _is_one_of(*things: Any) -> Check:
    return lambda value: any(value is thing for thing in things)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_counts(value: Any) -> bool:
    return type(value) in (tuple, torch.Size) and all(map(_is_count, value))


def _entries(*entries: Allowed) -> dict[str, Allowed]:
    return {entry.name: entry for entry in entries}


def _is_state(state: Any) -> bool:
    return type(state) is dict and all(
        type(key) is str and not key.startswith("__") for key in state
    )


def _fill_attributes(target: Any, state: Any) -> None:
    """The attributes of an instance."""
    if not _is_state(state):
        raise _rejected(f"that gives the state {state!r:.60} to {type(target).__name__}")
    target.__dict__.update(state)


def _fill_by_own(check: Check) -> Callable[[Any, Any], None]:
    """By the object's own `__setstate__`, where `check` lets the state pass."""

    def fill(target: Any, state: Any) -> None:
        if not check(state):
            raise _rejected(f"that gives the state {state!r:.60} to {type(target).__name__}")
        target.__setstate__(state)

    return fill


def _tuple_of(*checks: Check) -> Check:
    return lambda value: (
        type(value) is tuple and len(value) == len(checks) and all(map(_passes, checks, value))
    )


def _by_value(kind: Any, name: str) -> Allowed:
    """The entry of an enumeration: its members by their values, and nothing new."""

    def look_up(value: Any) -> Any:
        for member in kind.__members__.values():
            if type(member.value) is type(value) and member.value == value:
                return member
        raise _rejected(f"of the value {value!r:.60}, which {name} does not have")

    return Allowed(name, look_up, (lambda value: True,), 1)


_INT, _TEXT, _BYTES, _FLAG, _LIST = _of(int), _of(str), _of(bytes), _of(bool), _of(list)
_INT_OR_NONE = _of(int, types.NoneType)
_PLAIN = _entries(
    Allowed("builtins.set", set, (_LIST,)),
    Allowed("builtins.frozenset", frozenset, (_LIST,)),
    Allowed("builtins.bytes", bytes),
    Allowed("builtins.bytearray", bytearray, (_BYTES,)),
    Allowed("builtins.complex", complex, (_of(float), _of(float)), 2),
    Allowed("builtins.range", range, (_INT, _INT, _INT), 3),
    Allowed("builtins.slice", slice, (_INT_OR_NONE,) * 3, 3),
    Allowed(
        "_codecs.encode",
        lambda text, _: text.encode("latin-1"),
        (_TEXT, lambda code: code in ("latin1", "latin-1")),
        2,
    ),
    Allowed("collections.OrderedDict", collections.OrderedDict, (_LIST,), fill=_fill_attributes),
    Allowed("collections.Counter", collections.Counter, (_of(dict),)),
    Allowed("collections.deque", collections.deque, (_of(tuple, list), _INT_OR_NONE)),
    Allowed("argparse.Namespace", argparse.Namespace, fill=_fill_attributes),
    Allowed("types.SimpleNamespace", types.SimpleNamespace, fill=_fill_attributes),
    Allowed(
        "_io.BytesIO",
        io.BytesIO,
        (),
        fill=_fill_by_own(_tuple_of(_BYTES, _is_count, _of(types.NoneType))),
    ),
    Allowed("datetime.date", datetime.date, (_BYTES,), 1),
    Allowed("datetime.time", datetime.time, (_BYTES, _of(datetime.timezone)), 1),
    Allowed("datetime.datetime", datetime.datetime, (_BYTES, _of(datetime.timezone)), 1),
    Allowed("datetime.timedelta", datetime.timedelta, (_INT,) * 3, 3),
    Allowed("datetime.timezone", datetime.timezone, (_of(datetime.timedelta), _TEXT), 1),
    *(
        Allowed(f"pathlib.{kind.__name__}", lambda *parts, kind=kind: kind(*parts), (_TEXT,) * 256)
        for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
    ),
    Allowed("torch.Size", torch.Size, (_are_counts,), 1),
    Allowed("torch.device", torch.device, (_TEXT, _is_count), 1),
    Allowed(
        "torch.serialization._get_layout",
        lambda name: _torch_value(name.removeprefix("torch.")),
        (_TEXT,),
        1,
    ),
)


def _torch_value(name: str) -> Any:
    """torch's data type, layout or memory format of that name: these pickle by name."""
    found = vars(torch).get(name)  # getattr could import a module
    if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
        raise _rejected(f"of torch.{name}")
    return found


# NumPy. Its own constructors would take any bytes for the addresses of objects.


class _DataType:
    """Stands for `numpy.dtype` in a pickle: a data type of plain numbers or strings."""

    def __init__(self, code: str, *_: Any) -> None:
        if not re.fullmatch(r"[<>=|]?[biufcSU]\d{1,9}|\?", code):
            raise _rejected(f"of the numpy data type {code!r:.60}")
        self.plain = np.dtype(code)


def _fill_data_type(target: _DataType, state: Any) -> None:
    """Takes the byte order from NumPy's state of a data type; everything else in it has to be what
    the code says.
    """
    own = target.plain.__reduce__()[2]
    if (
        not isinstance(state, tuple)
        or len(state) != len(own)
        or state[1] not in ("<", ">", "=", "|")
        or state[2:] != own[2:]
    ):
        raise _rejected(f"that gives a state of its own to the numpy data type {target.plain}")
    target.plain = target.plain.newbyteorder(state[1])


def _fill_array(target: Any, state: Any) -> None:
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _DataType):
        raise _rejected(f"that gives the state {state!r:.60} to a numpy array")
    _, shape, kind, column_major, data = state
    if (
        not _are_counts(shape)
        or type(data) is not bytes
        or math.prod(shape) * kind.plain.itemsize != len(data)
    ):
        raise _rejected(f"of a numpy array of shape {shape!r:.60} with other data")
    own: Any = (1, shape, kind.plain, bool(column_major), data)
    target.__setstate__(own)


def _scalar(kind: _DataType, data: bytes) -> Any:
    if len(data) != kind.plain.itemsize:
        raise _rejected("of a numpy number with other data")
    return np.frombuffer(data, kind.plain)[0]


_NDARRAY = Allowed("numpy.ndarray")
_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMPY = _entries(
    _NDARRAY,
    Allowed("numpy.dtype", _DataType, (_TEXT, _FLAG, _FLAG), 1, fill=_fill_data_type),
    *(
        Allowed(f"{core}._reconstruct", lambda *_: np.empty(0, np.int8), (_is_one_of(_NDARRAY), _of(tuple), _BYTES), 3,
              fill=_fill_array)
        for core in _CORES
    ),
    *(Allowed(f"{core}.scalar", _scalar, (_of(_DataType), _BYTES), 2) for core in _CORES),
)  # fmt: skip


# Tensors.


def _check_extent(
    storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], itemsize: int
) -> None:
    """Raises `Rejected` for a tensor that reaches beyond its storage, which torch would enlarge."""
    last = (
        offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 not in size
        else -1
    )
    if (last + 1) * itemsize > storage._untyped_storage.nbytes():
        raise _rejected(f"of a tensor of shape {size!r:.60} that is larger than its storage")


def _tensor_v2(
    storage: Any, offset: int, size: Any, stride: Any, grad: bool, _: Any, about: Any = None
) -> Any:
    _check_extent(storage, offset, size, stride, storage.dtype.itemsize)
    return torch._utils._rebuild_tensor_v2(
        storage, offset, size, stride, grad, collections.OrderedDict(), about
    )


def _tensor_v3(
    storage: Any,
    offset: int,
    size: Any,
    stride: Any,
    grad: bool,
    _: Any,
    kind: Any,
    about: Any = None,
) -> Any:
    _check_extent(storage, offset, size, stride, kind.itemsize)
    return torch._utils._rebuild_tensor_v3(
        storage, offset, size, stride, grad, collections.OrderedDict(), kind, about
    )


def _parameter(data: Any, grad: bool, _: Any, state: Any = None) -> Any:
    return _with_attributes(torch.nn.Parameter(data, grad), state)


def _with_attributes(tensor: Any, state: Any) -> Any:
    """`tensor`, which this load has made, with attributes that no tensor has by itself."""
    if state is not None and not (
        _is_state(state) and not any(hasattr(type(tensor), key) for key in state)
    ):
        raise _rejected(f"that gives the state {state!r:.60} to a tensor")
    tensor.__dict__.update(state or {})
    return tensor


def _retyped(rebuild: Allowed, kind: Allowed, args: Any, state: Any) -> Any:
    """For torch's `_rebuild_from_type_v2`: a tensor with attributes."""
    tensor = rebuild.call(args)
    return _with_attributes(
        tensor.as_subclass(torch.nn.Parameter) if kind is _PARAMETER else tensor, state
    )


def _is_about_tensor(value: Any) -> bool:
    return value is None or (
        type(value) is dict and set(value) <= {"conj", "neg"} and all(map(_FLAG, value.values()))
    )


def _no_hooks(value: Any) -> bool:
    return not value and type(value) in (collections.OrderedDict, types.NoneType)


_TENSOR, _PARAMETER = Allowed("torch.Tensor"), Allowed("torch.nn.parameter.Parameter")
_STORED: tuple[Check, ...] = (
    _of(torch.storage.TypedStorage), _is_count, _are_counts, _are_counts, _FLAG, _no_hooks,
)  # fmt: skip
_REBUILD = _entries(
    Allowed("torch._utils._rebuild_tensor_v2", _tensor_v2, (*_STORED, _is_about_tensor), 6),
    Allowed(
        "torch._utils._rebuild_tensor_v3",
        _tensor_v3,
        (*_STORED, _of(torch.dtype), _is_about_tensor),
        7,
    ),
    Allowed(
        "torch._utils._rebuild_parameter", _parameter, (_of(torch.Tensor), _FLAG, _no_hooks), 3
    ),
)
_TORCH = _REBUILD | _entries(
    _TENSOR,
    _PARAMETER,
    Allowed("torch._utils._rebuild_parameter_with_state", _parameter, (_of(torch.Tensor), _FLAG, _no_hooks, _of(dict)), 4),
    Allowed(
        "torch._tensor._rebuild_from_type_v2", _retyped,
        (_is_one_of(*_REBUILD.values()), _is_one_of(_TENSOR, _PARAMETER), _of(tuple), _of(dict, types.NoneType)), 4,
    ),
    Allowed("torch._C.Generator", torch.Generator, (_of(torch.device),), 1,
          fill=_fill_by_own(_tuple_of(_INT, _INT_OR_NONE, _of(torch.Tensor)))),
)  # fmt: skip


# Classes of packages, which are imported where a pickle names them.

_DCP = "torch.distributed.checkpoint."
_INDEX = {
    _DCP
    + "metadata": "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
    "TensorProperties _MEM_FORMAT_ENCODING StorageMeta",
    _DCP + "filesystem": "_StorageInfo _StoragePrefix",
    _DCP + "planner": "SavePlan WriteItem WriteItemType TensorWriteData",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
}
_MEGATRON = {"megatron.core.optimizer.optimizer_config": "OptimizerConfig", "signal": "Signals"}
_FP8 = {
    "megatron.core.extensions.transformer_engine": "TEDelayedScaling",
    "transformer_engine.common.recipe": "DelayedScaling Float8CurrentScaling Float8BlockScaling "
    "MXFP8BlockScaling NVFP4BlockScaling Format _FormatHelper MMParams QParams",
}
_ENUM_PACKAGES = ("megatron.core.", "transformer_engine.common.")
# nothing of them passes as a type of a user
_PACKAGES = ("torch", "numpy", "megatron", "transformer_engine", "cp_ring")


def _of_package(module: str, name: str) -> Allowed | None:
    """The entry of a listed class: an enumeration, a named tuple, or one whose instances are their
    attributes.
    """
    kind = getattr(importlib.import_module(module), name, None)
    label = f"{module}.{name}"
    if isinstance(kind, enum.EnumMeta):
        return _by_value(kind, label)
    if not isinstance(kind, type):
        return None
    if issubclass(kind, tuple):
        fields: Any = getattr(kind, "_fields", ())
        return Allowed(
            label, kind, (lambda value: not isinstance(value, Allowed),) * len(fields), len(fields)
        )
    own = name == "TensorProperties"
    return Allowed(
        label,
        lambda: kind.__new__(kind),
        fill=_fill_by_own(_of(tuple)) if own else _fill_attributes,
    )


def _enumeration(module: str, name: str) -> Allowed | None:
    """The entry of an enumeration of Megatron or TransformerEngine, whose module the program has
    imported.
    """
    loaded = sys.modules.get(module) if module.startswith(_ENUM_PACKAGES) else None
    kind = getattr(loaded, "__dict__", {}).get(name)
    if isinstance(kind, enum.EnumMeta) and len(kind) > 0 and kind.__module__ == module:
        return _by_value(kind, f"{module}.{name}")
    return None


def _of_user() -> dict[str, Allowed]:
    """What the program, and no package that cp_ring knows, has declared safe."""
    found = {}
    for declared in torch.serialization.get_safe_globals():
        thing, name = (
            declared
            if isinstance(declared, tuple)
            else (declared, f"{declared.__module__}.{declared.__qualname__}")
        )
        if name.split(".")[0] in _PACKAGES:
            continue
        new = functools.partial(thing.__new__, thing) if isinstance(thing, type) else None
        entry = Allowed(name, thing, None, fill=_fill_as_pickle, new=new)
        found[name] = _by_value(thing, name) if isinstance(thing, enum.EnumMeta) else entry
    return found


def _fill_as_pickle(target: Any, state: Any) -> None:
    """As plain `pickle` does it."""
    reader = _PythonUnpickler(io.BytesIO())
    reader.stack = [target, state]
    _PythonUnpickler.load_build(reader)


# The reader.

_OPCODES = {
    *(
        pickle.PROTO,
        pickle.FRAME,
        pickle.STOP,
        pickle.MARK,
        pickle.POP,
        pickle.POP_MARK,
        pickle.DUP,
        pickle.MEMOIZE,
    ),
    *(pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.GET, pickle.BINGET, pickle.LONG_BINGET),
    *(
        pickle.NONE,
        pickle.NEWTRUE,
        pickle.NEWFALSE,
        pickle.INT,
        pickle.BININT,
        pickle.BININT1,
        pickle.BININT2,
        pickle.LONG,
    ),
    *(
        pickle.LONG1,
        pickle.LONG4,
        pickle.FLOAT,
        pickle.BINFLOAT,
        pickle.UNICODE,
        pickle.BINUNICODE,
        pickle.SHORT_BINUNICODE,
    ),
    *(
        pickle.BINUNICODE8,
        pickle.BINBYTES,
        pickle.SHORT_BINBYTES,
        pickle.BINBYTES8,
        pickle.EMPTY_TUPLE,
        pickle.TUPLE,
    ),
    *(
        pickle.TUPLE1,
        pickle.TUPLE2,
        pickle.TUPLE3,
        pickle.EMPTY_LIST,
        pickle.LIST,
        pickle.EMPTY_DICT,
        pickle.DICT,
    ),
    *(pickle.EMPTY_SET, pickle.FROZENSET, pickle.GLOBAL, pickle.STACK_GLOBAL),
}


_PythonUnpickler: Any = pickle._Unpickler


def _only_for(*kinds: type, marked: bool = False, under: int = 1) -> Any:
    """Wraps an instruction of `pickle` that puts items into a container: it has to be of one of
    these types, exactly.
    """

    def wrap(instruction: Any) -> Any:
        @functools.wraps(instruction)
        def load(self: Any) -> None:
            stack = self.metastack[-1] if marked else self.stack
            target = stack[-1] if marked else stack[-1 - under]
            if type(target) not in kinds:
                raise _rejected(f"that puts items into {target!r:.60}")
            instruction(self)

        return load

    return wrap


_LISTS, _MAPPINGS = (list, collections.deque), (dict, collections.OrderedDict, collections.Counter)


class _Gate(_PythonUnpickler):
    """`pickle.Unpickler` of the names in `entries`, and of `classes` by module.

    In Python, since the one in C lets nobody see which object is given which state: 7 s instead of
    3 s for 100,000 tensors.
    """

    entries: ClassVar[dict[str, Allowed]] = {}
    classes: ClassVar[dict[str, str]] = {}

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        # by identity: what takes a state and has none yet
        self.made: dict[int, tuple[Any, Allowed]] = {}

    def load_reduce(self) -> None:
        """Calls an entry."""
        self._call(new=False)

    def load_newobj(self) -> None:
        """Calls an entry, without `__init__`."""
        self._call(new=True)

    def _call(self, new: bool) -> None:
        args, entry = self.stack.pop(), self.stack.pop()
        if type(entry) is not Allowed:
            raise _rejected(f"that calls {entry!r:.60}")
        found = entry.call(args, new)
        if entry.fill is not None:
            self.made[id(found)] = found, entry
        self.append(found)

    def load_build(self) -> None:
        """Gives an object that this load has made its state, once."""
        state, target = self.stack.pop(), self.stack[-1]
        _, entry = self.made.pop(id(target), (None, None))
        if entry is None or entry.fill is None:
            raise _rejected(f"that gives a state to {target!r:.60}")
        entry.fill(target, state)

    def load_binpersid(self) -> None:
        """A storage of an archive."""
        key = self.stack[-1]
        if type(key) is not tuple or len(key) not in (5, 6) or not _names_storage(*key):
            raise _rejected(f"with the persistent id {key!r:.60}")
        super().load_binpersid()

    dispatch = {code[0]: _PythonUnpickler.dispatch[code[0]] for code in _OPCODES} | {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.BINPERSID[0]: load_binpersid,
        pickle.APPEND[0]: _only_for(*_LISTS)(_PythonUnpickler.load_append),
        pickle.APPENDS[0]: _only_for(*_LISTS, marked=True)(_PythonUnpickler.load_appends),
        pickle.SETITEM[0]: _only_for(*_MAPPINGS, under=2)(_PythonUnpickler.load_setitem),
        pickle.SETITEMS[0]: _only_for(*_MAPPINGS, marked=True)(_PythonUnpickler.load_setitems),
        pickle.ADDITEMS[0]: _only_for(set, marked=True)(_PythonUnpickler.load_additems),
    }

    def find_class(self, module: str, name: str) -> Any:
        """The entry of that name, or a constant of torch; raises `Rejected` unless it is listed."""
        if self.proto < 3:
            module, name = NAME_MAPPING.get(
                (module, name), (IMPORT_MAPPING.get(module, module), name)
            )
        if module == "pathlib._local":  # where Python 3.13 alone defines them
            module = "pathlib"
        found = self.entries.get(f"{module}.{name}")
        if found is None and name in self.classes.get(module, "").split():
            found = _of_package(module, name)
        if found is None:
            found = self.find_other(module, name)
        if found is None:
            raise _rejected(f"of {module}.{name}")
        return found

    def find_other(self, module: str, name: str) -> Any:
        """A name that no table holds, or None."""
        return _torch_value(name) if module == "torch" else None

    def persistent_load(self, key: Any) -> Any:
        """Replaced by torch where it reads an archive; no other pickle has storages."""
        raise _rejected(f"with the persistent id {key!r:.60}")

    def read(self) -> Any:
        """As `load`; raises `Rejected` for an instruction that neither an index nor an extra state
        has.
        """
        try:
            return self.load()
        except KeyError as error:  # also a reference to nothing
            raise _rejected(f"with the instruction {error.args[0]!r:.20}") from None


def _names_storage(
    what: Any, kind: Any, key: Any, location: Any, size: Any, view: Any = None
) -> bool:
    """Whether these are the parts of the persistent id of a storage, which torch would use
    unchecked.
    """
    plain = what == "storage" and type(key) is str and type(location) is str and _is_count(size)
    typed = type(kind) is torch.serialization.StorageType or kind is torch.UntypedStorage
    return plain and typed and (view is None or _tuple_of(_TEXT, _is_count, _is_count)(view))


# Archives.


class _ArchiveUnpickler(_Gate):
    entries = _PLAIN | _NUMPY | _TORCH
    classes = _MEGATRON

    def find_other(self, module: str, name: str) -> Any:
        """Also enumerations and what a user declared safe; torch finds the types of storages
        itself.
        """
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.UntypedStorage
        return (
            _enumeration(module, name)
            or _of_user().get(f"{module}.{name}")
            or super().find_other(module, name)
        )


class _StorageUnpickler(_Gate):
    def find_other(self, module: str, name: str) -> Any:
        """Types of storages alone."""
        return (
            torch.UntypedStorage if (module, name) == ("torch.storage", "UntypedStorage") else None
        )


class _Reader:
    """Stands for the module `pickle` where torch reads an archive."""

    def __init__(self, unpickler: type[_Gate]) -> None:
        self.Unpickler = unpickler

    def load(self, file: Any, **options: Any) -> Any:
        return self.Unpickler(file, **options).load()


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

    Raises `Rejected`, with a message of one line, if the file is not a zip archive of torch.save or
    names something that is not allowed; `OSError` if the file cannot be read.
    """
    with _opened(file) as opened:
        start = opened.tell()
        magic = opened.read(4)
        opened.seek(start)
        if magic != _ZIP:  # where torch.load would take the file for one of its legacy formats
            raise Rejected(
                f"the checkpoint holds a file that is no zip archive of torch.save: {_ADVICE}"
            )
        with _one_line():
            # Python's zipfile may see other records
            archive: Any = torch._C.PyTorchFileReader(opened)
            if "constants.pkl" in archive.get_all_records():
                raise Rejected(
                    "the checkpoint holds a TorchScript archive, which is code: it is not loaded"
                )
            return torch.serialization._load(
                archive, map_location, _Reader(_ArchiveUnpickler), encoding="utf-8"
            )


def storage_from_bytes(data: bytes) -> Any:
    """As `torch.storage._load_from_bytes`: a storage within a pickled tensor, which torch still
    writes in its legacy format.
    """
    if data[:4] == _ZIP:
        return torch_load(io.BytesIO(data))
    with _one_line():
        return torch.serialization._legacy_load(
            io.BytesIO(data), None, _Reader(_StorageUnpickler), encoding="utf-8"
        )


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except (ConfigError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a forged archive raises nearly anything
        why = (str(error).strip().splitlines() or [""])[0]
        text = (
            f"the checkpoint holds an archive that cannot be loaded ({type(error).__name__}: "
            f"{why:.200}): {_ADVICE}"
        )
        raise Rejected(text) from None


# The index, and extra states.


class IndexUnpickler(_Gate):
    """Reads `.metadata` of a distributed checkpoint, and no other pickle."""

    entries = _PLAIN
    classes = _INDEX


class ExtraStateUnpickler(_Gate):
    """Reads the extra state of TransformerEngine's layers: scaling factors and the recipe of fp8,
    pickled into a tensor.

    Its names are those of Megatron's own `SafeUnpickler` (0.19), which NumPy's constructors could
    lead astray.
    """

    entries = _PLAIN | _NUMPY | _TORCH | _entries(
        *(
            Allowed(name, lambda data: storage_from_bytes(data), (_BYTES,), 1)
            for name in ("torch.storage._load_from_bytes",
            "megatron.core.safe_globals.safe_load_from_bytes")
        )
    )  # fmt: skip
    classes = _FP8


def load_index(file: Any) -> Any:
    """As `pickle.load` of an open `.metadata`; raises `Rejected` where it is anything else."""
    return IndexUnpickler(file).read()


class PickleOfIndex:
    """Stands for the module `pickle` where torch reads `.metadata`: only `load` differs, unless
    checkpoints are trusted.
    """

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
    """While the block runs, `torch.load` and `torch.jit.load` in this process are gated, unless
    checkpoints are trusted.

    Raises `Rejected` where code, classes or enumerations of the process are not what they were
    before.
    """
    global _depth
    before = process_state.snapshot() if _depth == 0 and not current().trust_checkpoint else []
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
    changed = process_state.first_change(before)
    if changed:
        raise Rejected(f"loading the checkpoint has changed {changed} of this process: {_ADVICE}")


def _gated() -> bool:
    return _depth > 0 and not current().trust_checkpoint


@around
def gated_torch_load(
    original: Function, f: Any, map_location: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """`torch.load` that goes through the gate within `restricted()`, and as it was outside."""
    if _gated():
        return torch_load(f, map_location)
    return original(f, map_location, *args, **kwargs)


@around
def gated_jit_load(original: Function, *args: Any, **kwargs: Any) -> Any:
    """`torch.jit.load` that raises `Rejected` within `restricted()`, and as it was outside."""
    if _gated():
        raise Rejected(
            "the checkpoint holds a TorchScript archive, which is code: it is not loaded"
        )
    return original(*args, **kwargs)


@around
def gated_storage(original: Function, b: bytes) -> Any:
    """`torch.storage._load_from_bytes` that is `storage_from_bytes` within `restricted()`, and as
    it was outside.
    """
    return storage_from_bytes(b) if _gated() else original(b)


class PickleOfExtraState:
    """Stands for the module `pickle` in modules that read extra states: `loads` is gated within
    `restricted()`.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)

    def loads(self, data: bytes, **options: Any) -> Any:
        return (
            ExtraStateUnpickler(io.BytesIO(data)).read()
            if _gated()
            else pickle.loads(data, **options)
        )
