"""Runs the ranks of a job with torch's elastic launcher, and derives the exit code."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from cp_ring.tools.job.command_line import Command
from cp_ring.tools.job.output import ERROR, RankOutput

KILLED = 128 + signal.SIGKILL


class _Interrupts:
    """The handler of Ctrl-C. The first Ctrl-C ends the job as SIGTERM does; the second one kills
    the ranks.
    """

    def __init__(self, output: RankOutput):
        self.count = 0
        self._output = output

    def __call__(self, number: int, frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        self.count += 1
        if self.count == 1:
            self._output.announce(
                "Ctrl-C: the job saves and then ends; Ctrl-C again ends it at once, without saving"
            )
            raise SignalException("Ctrl-C", signal.SIGTERM)
        self._output.announce("Ctrl-C again: the ranks are killed")
        _kill_children()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        earlier = signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, earlier)


def _kill_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


_LONGEST = 50  # characters of a folder in which a rank's sockets still have names, of at most 107


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """The environment of the ranks, with a folder for their temporary files.

    A rank that is killed leaves its own behind: those of wandb, and sockets of data loaders.
    """
    scratch = Path(tempfile.gettempdir())
    compiled = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/torchinductor_{getpass.getuser()}"}
    before = dict(os.environ)
    os.environ.update(compiled | before | variables)  # the same for the next job
    handled = os.environ["PET_SIGNALS_TO_HANDLE"].split(",")  # by torch's launcher
    os.environ["PET_SIGNALS_TO_HANDLE"] = ",".join(name for name in handled if name != "SIGINT")
    with contextlib.ExitStack() as stack:
        if len(str(scratch)) < _LONGEST:
            folder = tempfile.TemporaryDirectory(prefix="cp_ring-", ignore_cleanup_errors=True)
            os.environ["TMPDIR"] = stack.enter_context(folder)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def launch(command: Command, output: RankOutput) -> int:
    """Runs all ranks of this node until they end.

    Returns 0, the exit code of the first rank that failed (2 where the ranks reject the job), 143
    after SIGTERM or Ctrl-C, and 137 after a second Ctrl-C. The last line on stderr is the error, if
    there is one.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    arguments = ["--redirects", "3", "--log-dir", str(output.folder), *command.arguments]
    interrupts = _Interrupts(output)
    code = 0
    line = ""
    with _environment(command.environment), interrupts.handled():
        try:
            with output.following():
                run(get_args_parser().parse_args(arguments))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
            # otherwise the ranks have rejected the job and printed why
            if code != 2 or not output.errors:
                line = _describe_failure(rank, failure.exitcode, output)
        except SignalException as stop:
            code = KILLED if interrupts.count > 1 else 128 + stop.sigval
    for text in [*output.errors, *filter(None, [line])]:
        print(text, file=sys.stderr, flush=True)
    return code


def _describe_failure(rank: int, exit_code: int, output: RankOutput) -> str:
    """How the first rank that failed ended, and where its output is."""
    ending = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    reason = output.exceptions.get(rank, "")
    return (
        f"{ERROR}rank {rank} ended with {ending}{reason and f' ({reason[:200]})'}; the output of "
        f"all ranks is in {output.log}"
    )
