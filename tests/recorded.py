"""What a CUDA graph does, on the CPU: the operations of a call, recorded once and repeated on the
same memory.

A graph knows no Python. What may be in it is therefore seen from the operations alone: each reads
memory that the caller, an earlier call or an earlier operation of the recording has written, and
none hands a value to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

HOST = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "allclose", "unique",
    "masked_select",
    "is_pinned",
        "_pin_memory", "lift_fresh", "lift", "bernoulli_", "rand", "randn", "native_dropout"}  # fmt: skip
"""Operations that wait for the device, make tensors of what the host has, or draw numbers."""
METHODS = {
    "tolist",
    "numpy",
    "cpu",
    "item",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "cuda",
    "pin_memory",
}
"""Methods of a tensor that wait for the device, or make tensors of what the host has."""


@dataclass
class Operation:
    """One operation with its arguments, and the tensors that it returned."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]

    @property
    def name(self) -> str:
        return str(self.function.overloadpacket.__name__)

    @property
    def inputs(self) -> list[Tensor]:
        return [x for x in tree_flatten((self.args, self.kwargs))[0] if isinstance(x, Tensor)]

    @property
    def is_view(self) -> bool:
        """Whether the result is memory of an argument, and nothing was written."""
        alias = (
            self.function._schema.returns[0].alias_info if self.function._schema.returns else None
        )
        return alias is not None and not alias.is_write

    def repeat(self) -> None:
        """Runs it again; what it returns goes to the memory to which it went when it was recorded."""
        if self.is_view or self.name in (
            "empty",
            "new_empty",
            "empty_strided",
            "new_empty_strided",
            "set_",
        ):
            return
        again = self.function(*self.args, **self.kwargs)
        for old, new in zip(self.results, tensors(again), strict=True):
            if old.numel() and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class _Methods(TorchFunctionMode):
    """Sees methods that read a tensor on the CPU without an operation, and would wait for a device."""

    def __init__(self, names: list[str]):
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """Within it, the operations of this thread are appended to `operations`, in the order in which
    they run.

    `names` has the functions and methods of torch that were called.
    """

    def __init__(self, operations: list[Operation], names: list[str]):
        super().__init__()
        self.operations, self._methods = operations, _Methods(names)

    def __enter__(self) -> Any:
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._methods.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace != "profiler":
            self.operations.append(Operation(func, args, kwargs or {}, tensors(results)))
        return results


def tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, Tensor)]


def record(call: Callable[[], Any]) -> tuple[list[Operation], list[str]]:
    """The operations of a call, forward and backward, and the names of torch's functions that it
    called.
    """
    operations: list[Operation] = []
    names: list[str] = []
    with Recording(operations, names):
        call()
    return operations, names


def repeat(operations: list[Operation]) -> None:
    """All of them again, as a graph is replayed. Messages of a process group are waited for before
    the next other operation.
    """
    posted: list[Any] = []
    with torch.no_grad():
        for operation in operations:
            if operation.function.namespace == "c10d":
                results = operation.function(*operation.args, **operation.kwargs)
                posted.append(results[-1] if isinstance(results, tuple) else results)
                continue
            while posted:
                dist.Work.unbox(posted.pop()).wait()
            operation.repeat()


def of_the_host(operations: list[Operation], names: list[str]) -> list[str]:
    """Names of operations and methods that cannot be in a graph."""
    return [operation.name for operation in operations if operation.name in HOST] + [
        name for name in names if name in METHODS
    ]


def signature(
    operations: list[Operation], inputs: list[Tensor]
) -> tuple[list[tuple[Any, ...]], set[int]]:
    """What each operation is and on what memory it works; and the memory that neither the caller
    nor the recording has made.

    Memory is called by the position of the input or of the operation that made it, or by its
    address where it was there before. `operations` keep all tensors alive, so an address stands for
    one storage.
    """
    home = {_address(x): ("input", place) for place, x in enumerate(inputs)}
    found, before = [], set()
    for number, operation in enumerate(operations):
        arguments = []
        for x in operation.inputs:
            if _address(x) not in home:
                before.add(_address(x))
            arguments.append(
                (
                    home.get(_address(x), ("before", _address(x))),
                    tuple(x.shape),
                    x.stride(),
                    x.storage_offset(),
                    x.dtype,
                )
            )
        others = tuple(
            repr(x)
            for x in tree_flatten((operation.args, operation.kwargs))[0]
            if not isinstance(x, Tensor)
        )
        found.append((str(operation.function), others, *arguments))
        for place, x in enumerate(operation.results):
            if not operation.is_view and operation.name != "set_":
                home.setdefault(_address(x), ("made", number, place))
    return found, before


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def pairs(
    first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]
) -> Iterator[tuple[int, Any, Any]]:
    """Where two signatures differ."""
    if len(first) != len(second):
        yield -1, len(first), len(second)
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            yield number, a, b
