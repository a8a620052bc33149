"""Standard output and error of a rank may be files on a full disk: what is printed there must not
end the job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from cp_ring.observe.progress import warning_once

ERROR = "cp_ring: error: "
_IMPORTANT = re.compile(r"cp_ring: |(?:WARNING|ERROR|CRITICAL):cp_ring\b")
_VALIDATION = re.compile(r"\s*(validation loss at iteration .*?)[ |]*$")
_STEP = re.compile(r".*\biteration +(\d+)/ *(\d+) \|(.*)")


def for_people(line: str) -> str | None:
    """A line of a rank as a person needs it, None for all others."""
    if _IMPORTANT.match(line):
        return line
    validation = _VALIDATION.match(line)
    return validation[1] if validation else None


def step_of(line: str) -> str | None:
    """The tidy line of a step, from the one that Megatron prints; None for all others."""
    step = _STEP.match(line)
    if step is None:
        return None
    values = [
        (name.strip(), text)
        for name, _, text in (part.partition(":") for part in step[3].split("|"))
    ]
    shown = [f"{n} {float(x):.5g}" for n, x in values if n.endswith(" loss") or n == "grad norm"]
    shown += [f"{float(x):,.0f} ms" for n, x in values if n.endswith("per iteration (ms)")]
    return " | ".join([f"step {step[1]}/{step[2]}", *shown])


def follow(log: Path, rank: int) -> None:
    """Sends all that this process and its children print to `log`, and to the console what a
    person needs. A process of its own does so: nothing is lost where this one crashes.
    """
    rest = log.open("ab", buffering=0)
    command = [sys.executable, "-m", __name__, str(log), str(rank)]
    follower = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    pipe = follower.stdin
    assert pipe is not None

    def redirect(file: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file, 1)
        os.dup2(file, 2)

    def end() -> None:
        redirect(rest.fileno())
        pipe.close()
        follower.wait()

    redirect(pipe.fileno())
    atexit.register(end)


def main() -> None:
    """Reads what a rank prints; `follow` starts it."""
    with open(sys.argv[1], "ab", buffering=0) as log:
        for raw in sys.stdin.buffer:
            with contextlib.suppress(OSError):  # a full disk, or a console that is gone
                log.write(b"[rank %s] %s" % (sys.argv[2].encode(), raw))
            line = raw.decode(errors="replace").rstrip()
            with contextlib.suppress(OSError):
                if shown := for_people(line) or step_of(line):
                    print(shown, file=sys.stderr if shown.startswith(ERROR) else None, flush=True)


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


if __name__ == "__main__":
    main()
