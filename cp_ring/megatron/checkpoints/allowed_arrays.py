"""What a pickle may do with arrays and tensors: their data must be what their shapes say."""

from __future__ import annotations

import collections
import math
import re
import types
from typing import Any

import numpy as np
import torch

from cp_ring.megatron.checkpoints.allowed import (
    BYTES,
    FLAG,
    INT,
    INT_OR_NONE,
    TEXT,
    Allowed,
    Check,
    are_counts,
    fill_by_own,
    is_count,
    is_one_of,
    is_state,
    of,
    rejected,
    table_of,
    tuple_of,
)

# NumPy. Its own constructors would take any bytes for the addresses of objects.


class _DataType:
    """Stands for `numpy.dtype` in a pickle: a data type of plain numbers or strings."""

    def __init__(self, code: str, *_: Any) -> None:
        if not re.fullmatch(r"[<>=|]?[biufcSU]\d{1,9}|\?", code):
            raise rejected(f"of the numpy data type {code!r:.60}")
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
        raise rejected(f"that gives a state of its own to the numpy data type {target.plain}")
    target.plain = target.plain.newbyteorder(state[1])


def _fill_array(target: Any, state: Any) -> None:
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _DataType):
        raise rejected(f"that gives the state {state!r:.60} to a numpy array")
    _, shape, kind, column_major, data = state
    if (
        not are_counts(shape)
        or type(data) is not bytes
        or math.prod(shape) * kind.plain.itemsize != len(data)
    ):
        raise rejected(f"of a numpy array of shape {shape!r:.60} with other data")
    own: Any = (1, shape, kind.plain, bool(column_major), data)
    target.__setstate__(own)


def _scalar(kind: _DataType, data: bytes) -> Any:
    if len(data) != kind.plain.itemsize:
        raise rejected("of a numpy number with other data")
    return np.frombuffer(data, kind.plain)[0]


_NDARRAY = Allowed("numpy.ndarray")
_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
NUMPY = table_of(
    _NDARRAY,
    Allowed("numpy.dtype", _DataType, (TEXT, FLAG, FLAG), 1, fill=_fill_data_type),
    *(
        Allowed(f"{core}._reconstruct", lambda *_: np.empty(0, np.int8),
              (is_one_of(_NDARRAY), of(tuple), BYTES), 3,
              fill=_fill_array)
        for core in _CORES
    ),
    *(Allowed(f"{core}.scalar", _scalar, (of(_DataType), BYTES), 2) for core in _CORES),
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
        raise rejected(f"of a tensor of shape {size!r:.60} that is larger than its storage")


def _tensor_v2(
    storage: Any, offset: int, size: Any, stride: Any, grad: bool, _: Any, about: Any = None
) -> Any:
    _check_extent(storage, offset, size, stride, storage.dtype.itemsize)
    return torch._utils._rebuild_tensor_v2(
        storage, offset, size, stride, grad, collections.OrderedDict(), about
    )


def _tensor_v3(storage: Any, *rest: Any) -> Any:
    offset, size, stride, grad, _, kind, *about = rest
    _check_extent(storage, offset, size, stride, kind.itemsize)
    return torch._utils._rebuild_tensor_v3(
        storage, offset, size, stride, grad, collections.OrderedDict(), kind, *about
    )


def _parameter(data: Any, grad: bool, _: Any, state: Any = None) -> Any:
    return _with_attributes(torch.nn.Parameter(data, grad), state)


def _with_attributes(tensor: Any, state: Any) -> Any:
    """`tensor`, which this load has made, with attributes that no tensor has by itself."""
    if state is not None and not (
        is_state(state) and not any(hasattr(type(tensor), key) for key in state)
    ):
        raise rejected(f"that gives the state {state!r:.60} to a tensor")
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
        type(value) is dict and set(value) <= {"conj", "neg"} and all(map(FLAG, value.values()))
    )


def _no_hooks(value: Any) -> bool:
    return not value and type(value) in (collections.OrderedDict, types.NoneType)


_TENSOR = Allowed("torch.Tensor")
_PARAMETER = Allowed("torch.nn.parameter.Parameter")
_STORED: tuple[Check, ...] = (
    of(torch.storage.TypedStorage), is_count, are_counts, are_counts, FLAG, _no_hooks,
)  # fmt: skip
_REBUILD = table_of(
    Allowed("torch._utils._rebuild_tensor_v2", _tensor_v2, (*_STORED, _is_about_tensor), 6),
    Allowed(
        "torch._utils._rebuild_tensor_v3",
        _tensor_v3,
        (*_STORED, of(torch.dtype), _is_about_tensor),
        7,
    ),
    Allowed("torch._utils._rebuild_parameter", _parameter, (of(torch.Tensor), FLAG, _no_hooks), 3),
)
TORCH = _REBUILD | table_of(
    _TENSOR,
    _PARAMETER,
    Allowed("torch._utils._rebuild_parameter_with_state", _parameter,
            (of(torch.Tensor), FLAG, _no_hooks, of(dict)), 4),
    Allowed(
        "torch._tensor._rebuild_from_type_v2", _retyped,
        (is_one_of(*_REBUILD.values()), is_one_of(_TENSOR, _PARAMETER), of(tuple),
         of(dict, types.NoneType)), 4,
    ),
    Allowed("torch._C.Generator", torch.Generator, (of(torch.device),), 1,
          fill=fill_by_own(tuple_of(INT, INT_OR_NONE, of(torch.Tensor)))),
)  # fmt: skip
