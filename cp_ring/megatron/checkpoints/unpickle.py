"""Checkpoints are data: their pickles may build plain values and known types, and call nothing else.

A pickle names the callables that it wants called. Here each name is looked up in an allow-list, and one that is not in it is
refused before anything is called. What a pickle could fill with addresses, numpy's arrays and data types, is built as numpy
pickles it and in no other way; and what the rest of the process shares, such as a class, gets no state from a pickle.

`--cp-ring-trust-checkpoint` switches this off; so that a type of one's own passes without it,
torch.serialization.add_safe_globals([Type]) adds that type.
"""

from __future__ import annotations

import contextlib
import enum
import io
import pickle
import sys
import time
import types
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from cp_ring.errors import ConfigError
from cp_ring.megatron.settings import current

_DCP = "torch.distributed.checkpoint."

# Everything that common.pt, .metadata and the byte entries of Megatron 0.16 to 0.19 name. All of it only builds values.
ALLOWED: dict[str, frozenset[str]] = {
    module: frozenset(names.split())
    for module, names in {
        "builtins": "dict list tuple set frozenset int float complex bool bytes bytearray str slice range",
        "collections": "OrderedDict defaultdict deque",
        "datetime": "datetime date time timedelta timezone",
        "argparse": "Namespace",
        "types": "SimpleNamespace",
        "pathlib": "Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath",
        "pathlib._local": "Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath",
        "signal": "Signals",
        "_io": "BytesIO",
        "_codecs": "encode",
        "copyreg": "_reconstructor",
        "numpy": "ndarray dtype",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.multiarray": "_reconstruct scalar",
        "numpy.core.numeric": "_frombuffer",
        "numpy._core.numeric": "_frombuffer",
        "torch": "Size device Tensor",
        "torch._C": "Generator",
        "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
        "_rebuild_parameter_with_state _rebuild_meta_tensor_no_storage",
        "torch._tensor": "_rebuild_from_type_v2",
        "torch.nn.parameter": "Parameter",
        "torch.serialization": "_get_layout",
        "torch.storage": "TypedStorage UntypedStorage",
        _DCP + "metadata": "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
        "TensorProperties _MEM_FORMAT_ENCODING StorageMeta",
        _DCP + "filesystem": "_StorageInfo _StoragePrefix",
        _DCP + "planner": "SavePlan WriteItem WriteItemType TensorWriteData",
        "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
        "megatron.core.enums": "ModelType",
        "megatron.core.optimizer": "OptimizerConfig",
        "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
        "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    }.items()
}
# Values of torch that pickle by name: torch.bfloat16, torch.strided, torch.contiguous_format.
_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)
# How a storage within a pickle is loaded, by torch and since megatron.core has replaced that.
_NESTED = (("torch.storage", "_load_from_bytes"), ("megatron.core.safe_globals", "safe_load_from_bytes"))
# What a state given to it would change for the whole process.
_SHARED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)
_ENUMS = ("megatron.core.", "transformer_engine.common.")


class Refused(ConfigError, pickle.UnpicklingError):
    """A pickle names something that is not in the allow-list."""


class Unpickler(pickle._Unpickler):
    """`pickle.Unpickler` that finds only what is in the allow-list, and gives a state to nothing that others share.

    In Python, as that in C lets nobody see the states that objects are given: an index of 100,000 tensors takes 7 s, not 3 s.
    """

    def load_build(self) -> None:
        """Gives an object its state; raises `Refused` where that could forge an address or change the whole process."""
        _check_state(self.stack[-2], self.stack[-1])
        super().load_build()

    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}

    def find_class(self, module: str, name: str) -> Any:
        """The object of that name; raises `Refused` unless it is allowed."""
        if self.proto < 3:  # as torch.save writes: by the names of Python 2
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if (module, name) in _NESTED:
            return _load_nested
        if name in ALLOWED.get(module, ()) and name in _INSTEAD:
            return _INSTEAD[name]
        if name in ALLOWED.get(module, ()) or f"{module}.{name}" in _users():
            return super().find_class(module, name)
        if "." not in name:
            if module == "torch" and isinstance(getattr(torch, name, None), _TORCH_VALUES):
                return getattr(torch, name)
            if module.startswith(_ENUMS):
                found = super().find_class(module, name)
                if isinstance(found, type) and issubclass(found, enum.Enum):
                    return found
        raise _refused(f"of {module}.{name}")


def _refused(what: str) -> Refused:
    return Refused(
        f"the checkpoint holds a pickle {what}, which could run code: it is not loaded; "
        "if you trust its origin, give --cp-ring-trust-checkpoint"
    )


def _array(*_: Any) -> Any:
    """For numpy's `_reconstruct`: an empty array, whatever is asked for; shape, data type and bytes are its state."""
    return np.empty(0, np.int8)


def _only_named(*_: Any) -> Any:
    """For `numpy.ndarray`: pickles name it for `_reconstruct`. Called, it would take any bytes for the addresses of objects."""
    raise _refused("that calls numpy.ndarray")


def _dtype(code: Any, *_: Any) -> Any:
    """For `numpy.dtype`: a copy, since others share the original; neither of objects nor of records."""
    made = np.dtype(code, copy=True) if isinstance(code, str) else None
    if made is None or made.hasobject or made.names is not None or made.subdtype is not None:
        raise _refused(f"of the numpy data type {code!r:.60}")
    return made


def _tensor_of_type(build: Any, kind: Any, args: Any, state: Any) -> Any:
    """For torch's `_rebuild_from_type_v2`, which would give the state to anything."""
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor)):
        raise _refused(f"that gives a state to {kind!r:.60}")
    return torch._tensor._rebuild_from_type_v2(build, kind, args, state)


_INSTEAD = {"ndarray": _only_named, "dtype": _dtype, "_reconstruct": _array, "_rebuild_from_type_v2": _tensor_of_type}


def _check_state(target: Any, state: Any) -> None:
    if isinstance(target, _SHARED):
        raise _refused(f"that gives a state to {target!r:.60}")
    if isinstance(target, np.dtype) and not _of_numpy(target, state):
        raise _refused(f"that gives a state of its own to the numpy data type {target}")
    if isinstance(target, np.ndarray) and target.size:  # its memory, which others may see by now, would be freed
        raise _refused("that gives a numpy array another state")


def _of_numpy(dtype: Any, state: Any) -> bool:
    """Whether numpy gives `dtype`, which nobody else holds, such a state: its own, in either order of bytes."""
    own = dtype.__reduce__()[2]
    plain = isinstance(state, tuple) and len(state) in (8, 9) and all(type(each) in (int, str, type(None)) for each in state[:8])
    return plain and dtype is not np.dtype(dtype.str) and state[1] in ("<", ">", "=", "|") and state[2:8] == own[2:8]


def load(file: Any, **options: Any) -> Any:
    """As `pickle.load`, through the allow-list."""
    return Unpickler(file, **options).load()


def torch_load(file: Any, map_location: Any = None) -> Any:
    """As `torch.load(file, weights_only=False)`, through the allow-list; TorchScript archives are refused."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if any(name.endswith("constants.pkl") for name in archive.namelist()):
                raise Refused("the checkpoint holds a TorchScript archive, which is code: it is not loaded")
    if hasattr(file, "seek"):
        file.seek(0)
    return _TORCH_LOAD(file, map_location=map_location, pickle_module=MODULE, weights_only=False)


_TORCH_LOAD = torch.load

# What torch takes for the module `pickle`.
MODULE = types.ModuleType("cp_ring_restricted_pickle")
MODULE.__dict__.update({name: getattr(pickle, name) for name in ("dump", "dumps", "Pickler", "UnpicklingError", "PickleError")})
MODULE.__dict__.update(load=load, loads=lambda data, **options: load(io.BytesIO(data), **options), Unpickler=Unpickler)


class PickleOfMetadata:
    """Stands for the module `pickle` where torch reads `.metadata`: as `MODULE`, unless checkpoints are trusted."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle if current().trust_checkpoint else MODULE, name)


_depth = 0


@contextlib.contextmanager
def restricted() -> Iterator[None]:
    """While the block runs, `torch.load` in this process goes through the allow-list, unless checkpoints are trusted."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def loading_of_checkpoints(torch_load_as_it_was: Any) -> Any:
    """`torch.load` that is restricted within `restricted()`, and as it was outside and where weights_only is given as true."""

    def load_of_torch(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _depth and not kwargs.get("weights_only") and not current().trust_checkpoint:
            return torch_load(f, map_location)
        return torch_load_as_it_was(f, map_location, *args, **kwargs)

    return load_of_torch


@contextlib.contextmanager
def one_line_refusal() -> Iterator[None]:
    """Ends the process with the one line of a `ConfigError`, torch-wrapped ones too; the first rank to fail prints it."""
    try:
        yield
    except (ConfigError, torch.distributed.checkpoint.CheckpointException) as error:
        ours = error if isinstance(error, ConfigError) else refusal_within(error)
        if ours is None:
            raise
        _end(str(ours))


def refusal_within(error: Any) -> ConfigError | None:
    """The refusal that torch's `CheckpointException` wraps, or None."""
    return next((inner for inner, _ in error.failures.values() if isinstance(inner, ConfigError)), None)


def _end(message: str) -> NoReturn:
    from torch.distributed.distributed_c10d import _get_default_store

    if not dist.is_initialized() or _get_default_store().add("cp_ring/refused", 1) == 1:
        print(f"cp_ring: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)  # a launcher ends all ranks as soon as one has, and the first must have spoken by then
    raise SystemExit(2)


def _users() -> set[str]:
    """Types that the program has declared safe with torch.serialization.add_safe_globals."""
    named = (entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals())
    return {f"{entry.__module__}.{entry.__qualname__}" for entry in named if isinstance(entry, type)}


def _load_nested(data: bytes) -> Any:
    return torch_load(io.BytesIO(data))
