"""What no load of a checkpoint may change: functions, classes and enumerations of Megatron, cp_ring
and torch.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator
from typing import Any

_PACKAGES = ("megatron.core", "megatron.training", "cp_ring")
_OF_TORCH = (
    "torch",
    "torch._tensor",
    "torch._utils",
    "torch.storage",
    "torch.serialization",
    "torch.autograd.function",
    "torch.nn.init",
    "torch.nn.functional",
    "torch.nn.parameter",
    "torch.nn.modules.module",
    "torch.nn.modules.linear",
    "torch.nn.modules.sparse",
    "torch.nn.modules.normalization",
    "torch.optim.optimizer",
    "torch.distributed.distributed_c10d",
    "torch.distributed.checkpoint.metadata",
    "argparse",
    "collections",
    "enum",
    "signal",
    "types",
)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod, property)
_MISSING = object()

Snapshot = list[tuple[str, Any, dict[str, Any]]]  # label, what holds the names, its names then


def snapshot() -> Snapshot:
    """The state now, in 20 to 40 ms. It holds every value that it compares, so that no identity is
    used again.
    """
    return [(label, owner, _watched(owner)) for label, owner in _owners()]


def first_change(before: Snapshot) -> str:
    """What is not as it was at the snapshot, by name, or ""."""
    for label, owner, names in before:
        now = _names(owner)
        for name, value in names.items():
            if now.get(name, _MISSING) is not value:
                return f"{label}.{name}"
        if isinstance(owner, type) and len(names) != len(_watched(owner)):
            return f"{label}.{next(name for name in _watched(owner) if name not in names)}"
    return ""


def _owners() -> Iterator[tuple[str, Any]]:
    """Modules, the classes and functions that they define, and members of enumerations."""
    for label, module in list(sys.modules.items()):
        if not (label in _OF_TORCH or label.startswith(_PACKAGES)) or not isinstance(
            module, types.ModuleType
        ):
            continue
        yield label, module
        for name, thing in list(vars(module).items()):
            # isinstance would ask the thing itself, which may be a stand-in that imports something
            kind = type(thing)
            if kind is types.FunctionType and thing.__module__ == label:
                yield f"{label}.{name}", thing
            elif issubclass(kind, type) and thing.__module__ == label:
                yield from _of_class(f"{label}.{name}", thing)


def _of_class(label: str, kind: type) -> Iterator[tuple[str, Any]]:
    yield label, kind
    for name, value in list(vars(kind).items()):
        if isinstance(value, types.FunctionType):
            yield f"{label}.{name}", value
    if isinstance(kind, enum.EnumMeta):
        yield f"{label}._member_map_", kind._member_map_
        yield f"{label}._value2member_map_", kind._value2member_map_
        yield from ((f"{label}.{name}", member) for name, member in kind._member_map_.items())


def _names(owner: Any) -> dict[Any, Any]:
    if isinstance(owner, types.FunctionType):
        return {
            "__code__": owner.__code__,
            "__defaults__": owner.__defaults__,
            "__kwdefaults__": owner.__kwdefaults__,
        }
    return owner if isinstance(owner, dict) else vars(owner)


def _watched(owner: Any) -> dict[Any, Any]:
    """Of a module its code; of a class its code and, where it is a dataclass, the defaults of its
    fields; else everything.
    """
    if not isinstance(owner, type | types.ModuleType) or isinstance(owner, enum.EnumMeta):
        return dict(_names(owner))
    fields = vars(owner).get("__dataclass_fields__", ())
    return {
        name: value
        for name, value in vars(owner).items()
        if issubclass(type(value), _CODE) or name in fields
    }
