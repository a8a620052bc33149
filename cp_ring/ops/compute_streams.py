"""The kernel calls of a pass on CUDA streams in turn, so that the first blocks of a call run on
processors for which the call before has no blocks left.

The stream of the pass launches no kernel call. It waits for messages, merges and sums, in the order
of the calls and one call behind them: so the bits are those of one stream, and two calls run at a
time. Each call waits for all that this stream was given before. What a call reads, and the memory
that it is given, may thus have been used by any call but the one before, whose results are still
held.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import cycle

import torch

from cp_ring.runtime import RUNTIME

_NOTHING = nullcontext()
_of_pass: ContextVar[torch.cuda.Stream | None] = ContextVar("stream of the pass", default=None)


_free: defaultdict[torch.cuda.Stream, list[list[torch.cuda.Stream]]] = RUNTIME.keep(
    defaultdict(list)
)
"""Streams that no pass has now, by the stream of the passes that had them: their memory may be used
again where that one is waited for. Passes of several threads have streams of their own.
"""


class ComputeStreams:
    """Those of one pass; beside the current stream, if there are at least two of a CUDA device."""

    def __init__(self, device: torch.device, count: int = 1):
        self._main: torch.cuda.Stream | None = None
        self._later: list[Callable[[], object]] = []
        if count > 1 and device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            try:
                self._sides = _free[self._main].pop()
            except IndexError:
                self._sides = [torch.cuda.Stream(device) for _ in range(count)]
            self._in_turn = cycle(self._sides)

    def next(self) -> AbstractContextManager[None]:
        """The block launches the next kernel call. Then what was to be done after the call before
        it is done.
        """
        return _NOTHING if self._main is None else self._on_next(self._main)

    @contextmanager
    def _on_next(self, main: torch.cuda.Stream) -> Iterator[None]:
        stream = next(self._in_turn)
        stream.wait_stream(main)
        earlier, self._later = self._later, [partial(main.wait_stream, stream)]
        token = _of_pass.set(main)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            _of_pass.reset(token)
        for action in earlier:
            action()

    def after[**P](self, action: Callable[P, object], *args: P.args, **named: P.kwargs) -> None:
        """Does something on the stream of the pass after all kernel calls so far: at once, or when
        the next one is launched.
        """
        if self._later:
            self._later.append(partial(action, *args, **named))
        else:
            action(*args, **named)

    def drain(self) -> None:
        """Does all that is to be done after the calls so far; the stream of the pass then waits for
        them.
        """
        later, self._later = self._later, []
        for action in later:
            action()

    def finish(self) -> None:
        """Drains; there are no more calls."""
        self.drain()
        if self._main is not None:
            _free[self._main].append(self._sides)


def shared[T](make: Callable[[], T]) -> T:
    """What kernel calls on several streams read, made by the first of them on the stream of the
    pass.
    """
    stream = _of_pass.get()
    if stream is None:
        return make()
    with torch.cuda.stream(stream):
        made = make()
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    return made
