"""Standard output and error of a rank may be files on a full disk: what is printed there must not
end the job.
"""

from __future__ import annotations

import sys
from typing import Any

from cp_ring.observe.progress import warning_once


class Tolerant:
    """A stream that loses what cannot be written, instead of raising `OSError`; the first time, a
    line says so if it can.

    Has every attribute of `stream`.
    """

    def __init__(self, stream: Any, name: str):
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Returns the length of `text`, whether or not it was written."""
        with warning_once(self._name):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """As `write`, line by line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Writes what is buffered, if that can be done."""
        with warning_once(self._name):
            self._stream.flush()


def tolerate() -> None:
    """Makes the standard streams of this process `Tolerant`. Does nothing where they are already,
    or where there are none.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Tolerant):
            setattr(
                sys, name, Tolerant(stream, f"standard {'output' if name == 'stdout' else 'error'}")
            )
