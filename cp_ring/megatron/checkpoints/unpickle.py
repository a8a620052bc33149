"""Checkpoints are data: their pickles may build plain values and known types, and call nothing else.

A pickle names the callables that it wants called. Here each name is looked up in an allow-list, and one that is not in it is
refused before anything is called. `--cp-ring-trust-checkpoint` switches this off; so that a type of one's own passes without,
torch.serialization.add_safe_globals([Type]) adds it.
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
from collections.abc import Iterator
from typing import Any, NoReturn

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
_ENUMS = ("megatron.core.", "transformer_engine.common.")


class Refused(ConfigError, pickle.UnpicklingError):
    """A pickle names something that is not in the allow-list."""


class Unpickler(pickle.Unpickler):
    """`pickle.Unpickler` that finds only what is in the allow-list."""

    def find_class(self, module: str, name: str) -> Any:
        """The object of that name; raises `Refused` unless it is allowed."""
        if (module, name) in _NESTED:
            return _load_nested
        if name in ALLOWED.get(module, ()) or f"{module}.{name}" in _users():
            return super().find_class(module, name)
        if "." not in name:
            if module == "torch" and isinstance(getattr(torch, name, None), _TORCH_VALUES):
                return getattr(torch, name)
            if module.startswith(_ENUMS):
                found = super().find_class(module, name)
                if isinstance(found, type) and issubclass(found, enum.Enum):
                    return found
        raise Refused(
            f"the checkpoint holds a pickle of {module}.{name}, which could run code: it is not loaded; "
            "if you trust its origin, give --cp-ring-trust-checkpoint"
        )


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
