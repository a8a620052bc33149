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

import collections
import contextlib
import enum
import functools
import importlib
import io
import os
import pickle
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import files
from cp_ring.megatron.checkpoints.allowed import (
    ADVICE,
    BYTES,
    PLAIN,
    TEXT,
    Allowed,
    Rejected,
    by_value,
    fill_attributes,
    fill_by_own,
    is_count,
    of,
    rejected,
    table_of,
    torch_value,
    tuple_of,
)
from cp_ring.megatron.checkpoints.allowed_arrays import NUMPY, TORCH
from cp_ring.megatron.rejection import first_line

# Classes of packages, which are imported where a pickle names them.

_DCP = "torch.distributed.checkpoint."
_INDEX = {
    _DCP + "metadata": "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata "
    "ChunkStorageMetadata "
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
        return by_value(kind, label)
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
        fill=fill_by_own(of(tuple)) if own else fill_attributes,
    )


def _enumeration(module: str, name: str) -> Allowed | None:
    """The entry of an enumeration of Megatron or TransformerEngine, whose module the program has
    imported.
    """
    loaded = sys.modules.get(module) if module.startswith(_ENUM_PACKAGES) else None
    kind = getattr(loaded, "__dict__", {}).get(name)
    if isinstance(kind, enum.EnumMeta) and len(kind) > 0 and kind.__module__ == module:
        return by_value(kind, f"{module}.{name}")
    return None


def _of_user() -> dict[str, Allowed]:
    """What the program, and no package that cp_ring knows, has declared safe."""
    entries = {}
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
        entries[name] = by_value(thing, name) if isinstance(thing, enum.EnumMeta) else entry
    return entries


def _fill_as_pickle(target: Any, state: Any) -> None:
    """As plain `pickle` does it."""
    reader = _PythonUnpickler(io.BytesIO())
    reader.stack = [target, state]
    _PythonUnpickler.load_build(reader)


# The reader.

_NAMES = """
PROTO FRAME STOP MARK POP POP_MARK DUP MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET
NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE
BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE
TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST EMPTY_DICT DICT EMPTY_SET FROZENSET GLOBAL STACK_GLOBAL
"""
_OPCODES = {getattr(pickle, name)[0] for name in _NAMES.split()}


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
                raise rejected(f"that puts items into {target!r:.60}")
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
        self.objects: dict[int, tuple[Any, Allowed]] = {}

    def load_reduce(self) -> None:
        """Calls an entry."""
        self._call(new=False)

    def load_newobj(self) -> None:
        """Calls an entry, without `__init__`."""
        self._call(new=True)

    def _call(self, new: bool) -> None:
        args = self.stack.pop()
        entry = self.stack.pop()
        if type(entry) is not Allowed:
            raise rejected(f"that calls {entry!r:.60}")
        result = entry.call(args, new)
        if entry.fill is not None:
            self.objects[id(result)] = result, entry
        self.append(result)

    def load_build(self) -> None:
        """Gives an object that this load has made its state, once."""
        state = self.stack.pop()
        target = self.stack[-1]
        _, entry = self.objects.pop(id(target), (None, None))
        if entry is None or entry.fill is None:
            raise rejected(f"that gives a state to {target!r:.60}")
        entry.fill(target, state)

    def load_binpersid(self) -> None:
        """A storage of an archive."""
        key = self.stack[-1]
        if type(key) is not tuple or len(key) not in (5, 6) or not _names_storage(*key):
            raise rejected(f"with the persistent id {key!r:.60}")
        super().load_binpersid()

    dispatch = {code: _PythonUnpickler.dispatch[code] for code in _OPCODES} | {
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
        entry = self.entries.get(f"{module}.{name}")
        if entry is None and name in self.classes.get(module, "").split():
            entry = _of_package(module, name)
        if entry is None:
            entry = self.find_other(module, name)
        if entry is None:
            raise rejected(f"of {module}.{name}")
        return entry

    def find_other(self, module: str, name: str) -> Any:
        """A name that no table holds, or None."""
        return torch_value(name) if module == "torch" else None

    def persistent_load(self, key: Any) -> Any:
        """Replaced by torch where it reads an archive; no other pickle has storages."""
        raise rejected(f"with the persistent id {key!r:.60}")

    def read(self) -> Any:
        """As `load`; raises `Rejected` for an instruction that neither an index nor an extra state
        has.
        """
        try:
            return self.load()
        except KeyError as error:  # also a reference to nothing
            raise rejected(f"with the instruction {error.args[0]!r:.20}") from None


def _names_storage(
    what: Any, kind: Any, key: Any, location: Any, size: Any, view: Any = None
) -> bool:
    """Whether these are the parts of the persistent id of a storage, which torch would use
    unchecked.
    """
    plain = what == "storage" and type(key) is str and type(location) is str and is_count(size)
    typed = type(kind) is torch.serialization.StorageType or kind is torch.UntypedStorage
    return plain and typed and (view is None or tuple_of(TEXT, is_count, is_count)(view))


# Archives.


class _ArchiveUnpickler(_Gate):
    entries = PLAIN | NUMPY | TORCH
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
                f"the checkpoint holds a file that is no zip archive of torch.save: {ADVICE}"
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
        raise Rejected(
            f"the checkpoint holds an archive that cannot be loaded ({type(error).__name__}: "
            f"{first_line(error):.200}): {ADVICE}"
        ) from None


# The index, and extra states.


class IndexUnpickler(_Gate):
    """Reads `.metadata` of a distributed checkpoint, and no other pickle."""

    entries = PLAIN
    classes = _INDEX


class ExtraStateUnpickler(_Gate):
    """Reads the extra state of TransformerEngine's layers: scaling factors and the recipe of fp8,
    pickled into a tensor.

    Its names are those of Megatron's own `SafeUnpickler` (0.19), which NumPy's constructors could
    lead astray.
    """

    entries = (
        PLAIN
        | NUMPY
        | TORCH
        | table_of(
            *(
                Allowed(name, lambda data: storage_from_bytes(data), (BYTES,), 1)
                for name in (
                    "torch.storage._load_from_bytes",
                    "megatron.core.safe_globals.safe_load_from_bytes",
                )
            )
        )
    )
    classes = _FP8


def load_index(file: Any) -> Any:
    """As `pickle.load` of an open `.metadata`; raises `Rejected` where it is anything else."""
    return IndexUnpickler(file).read()
