"""Functions that send messages run outside of compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch._compile import _disable_dynamo


def out_of_graphs[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Make a call in a compiled function, or in compiled autograd, break the graph.
    `torch.compiler.disable` would import the compiler.
    """
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        return (disabled if torch.compiler.is_compiling() else function)(*args, **options)

    return call
