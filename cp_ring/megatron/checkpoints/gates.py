"""The gates that `unpickle` puts before what torch and Megatron read, while a checkpoint loads."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from typing import Any

from cp_ring.megatron.settings import current
from cp_ring.megatron.wrapping import Function, around
from cp_ring.runtime import RUNTIME


class PickleOfIndex:
    """Stands for the module `pickle` where torch reads `.metadata`: only `load` differs, unless
    checkpoints are trusted.
    """

    def __getattr__(self, name: str) -> Any:
        if current().trust_checkpoint:
            return getattr(pickle, name)
        if name in ("loads", "Unpickler"):
            raise AttributeError(f"{name} is out of reach while checkpoints are not trusted")
        if name != "load":
            return getattr(pickle, name)
        from cp_ring.megatron.checkpoints.unpickle import load_index

        return load_index


_depth = RUNTIME.cell(0)


@contextlib.contextmanager
def restricted() -> Iterator[None]:
    """While the block runs, `torch.load` and `torch.jit.load` in this process are gated, unless
    checkpoints are trusted.

    Raises `Rejected` where code, classes or enumerations of the process are not what they were
    before.
    """
    # Before anything of the checkpoint is read.
    from cp_ring.megatron.checkpoints import process_state, unpickle  # noqa: F401

    before = (
        process_state.snapshot() if _depth.value == 0 and not current().trust_checkpoint else []
    )
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1
    changed = process_state.first_change(before)
    if changed:
        from cp_ring.megatron.checkpoints.allowed import ADVICE, Rejected

        raise Rejected(f"loading the checkpoint has changed {changed} of this process: {ADVICE}")


def _gated() -> bool:
    return _depth.value > 0 and not current().trust_checkpoint


@around
def gated_torch_load(
    original: Function, f: Any, map_location: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """`torch.load` that goes through the gate within `restricted()`, and as it was outside."""
    if _gated():
        from cp_ring.megatron.checkpoints.unpickle import torch_load

        return torch_load(f, map_location)
    return original(f, map_location, *args, **kwargs)


@around
def gated_jit_load(original: Function, *args: Any, **kwargs: Any) -> Any:
    """`torch.jit.load` that raises `Rejected` within `restricted()`, and as it was outside."""
    if _gated():
        from cp_ring.megatron.checkpoints.allowed import Rejected

        raise Rejected(
            "the checkpoint holds a TorchScript archive, which is code: it is not loaded"
        )
    return original(*args, **kwargs)


@around
def gated_storage(original: Function, b: bytes) -> Any:
    """`torch.storage._load_from_bytes` that is `storage_from_bytes` within `restricted()`, and as
    it was outside.
    """
    if not _gated():
        return original(b)
    from cp_ring.megatron.checkpoints.unpickle import storage_from_bytes

    return storage_from_bytes(b)


class PickleOfExtraState:
    """Stands for the module `pickle` in modules that read extra states: `loads` is gated within
    `restricted()`.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)

    def loads(self, data: bytes, **options: Any) -> Any:
        if not _gated():
            return pickle.loads(data, **options)
        from cp_ring.megatron.checkpoints.unpickle import ExtraStateUnpickler

        return ExtraStateUnpickler(io.BytesIO(data)).read()
