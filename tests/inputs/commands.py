"""Wrong command lines: the table is `commands.txt`. They run in this process, which may start none."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from unittest import mock

import psutil
import yaml

from tests.inputs import Case, fault
from tests.tools.slurm.job import TINY

MEMORY = {"SC_PHYS_PAGES": 64 << 18, "SC_PAGE_SIZE": 4096}
"""Of any machine: 64 GiB."""

SECONDS = 60
"""After which a command that does not end is given up."""


class Started(BaseException):
    """A command has gone on to start ranks."""


def start(*args, **kwargs):
    raise Started(str(args)[:80])


@contextlib.contextmanager
def folder():
    """A working folder with the files that command lines name, and what it holds."""
    with contextlib.suppress(ImportError):  # packages that Megatron imports leave files
        import megatron.training.arguments  # noqa: F401

    before = os.getcwd()
    with tempfile.TemporaryDirectory() as name, mock.patch.object(tempfile, "tempdir", name):
        os.chdir(name)
        Path("my.yaml").write_text(yaml.safe_dump(TINY))
        Path("text.txt").write_text("some words\n")
        Path("empty.txt").touch()
        Path("folder").mkdir()
        Path("folder", ".kept").touch()
        try:
            yield Path(name)
        finally:
            os.chdir(before)


def left(place: Path) -> set[str]:
    files = {str(path.relative_to(place)) for path in place.rglob("*")}
    return files | {f"process {child.pid}" for child in psutil.Process().children(recursive=True)}


def run(line: list[str]) -> tuple[object, str, str]:
    """The exit code, stdout and stderr of a command in this process."""
    from cp_ring import run as script
    from cp_ring.tools.cli import main
    from cp_ring.tools.job import certify_job, train
    from cp_ring.tools.slurm import submit

    out, err = io.StringIO(), io.StringIO()
    which, sysconf = shutil.which, os.sysconf
    with (
        mock.patch.object(os, "sysconf", lambda name: MEMORY.get(name) or sysconf(name)),
        mock.patch.object(sys, "argv", line),
        mock.patch.object(sys, "path", [*sys.path]),
        mock.patch.object(train, "launch", start),
        mock.patch.object(certify_job, "launch", start),
        mock.patch.object(submit, "_run_sbatch", start),
        mock.patch.object(shutil, "which", lambda name: None if name == "sbatch" else which(name)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code: object = 0
        try:
            (main if line[0] == "cp-ring" else script.main)()
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), err.getvalue()


def attempt(case: Case) -> str:
    """Why the command does not end as it should, or ""."""
    rest = case.kind.partition(": ")[2]
    text = f"{rest} {case.text}" if rest else case.text
    if "--set " in text and rest.endswith("--set"):
        text = f"{rest[: -len('--set')]} " + " ".join(
            f"--set {shlex.quote(one)}" for one in case.text.split(";")
        )
    signal.signal(signal.SIGALRM, lambda *_: start(f"{SECONDS} s"))
    with folder() as place:
        before = left(place)
        signal.alarm(SECONDS)
        try:
            code, out, err = run(shlex.split(text))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
        more = left(place) - before
    if code != 2:
        return f"exit code {code}: {out[:80]!r} {err[:200]!r}"
    if more or out.strip():
        return f"left {sorted(more)[:3]}, printed {out[:80]!r}: {err[:200]!r}"
    lines, wanted = err.splitlines(), [case.words, *case.further]
    if len(lines) != len(wanted):
        return f"{len(lines)} lines: {err[:400]!r}"
    faults = map(fault, (line.removeprefix("cp_ring: error: ") for line in lines), wanted)
    return next(filter(None, faults), "")
