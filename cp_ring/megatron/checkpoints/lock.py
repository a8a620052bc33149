"""One job at a time writes to a folder of checkpoints: a lock file that outlives neither its job
nor a lost node for long.

The file names its owner: a random token, host and process, and the Slurm job. It is made by a hard
link, which is atomic on NFS too, and the owner renews its time every few seconds by the clock of
the file system. A lock whose owner is known to be dead (its process is gone from this machine, or
Slurm has restarted its job) is taken over at once; any other one after `STALE_S` seconds without a
sign of life.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import files
from cp_ring.megatron.rejection import note
from cp_ring.runtime import RUNTIME

NAME = "cp_ring_lock.json"
BEAT_S = 5.0
STALE_S = 60.0
_KEPT_PREDECESSORS = 32

_Token = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Word = Annotated[str, Field(max_length=256)]


class Lost(OSError):
    """The lock of this process is in the hands of another job."""


class Owner(BaseModel):
    """Who holds a lock.

    machine: identifies the running kernel and its process namespace, in which `pid` and `started`
    have a meaning; "" if unknown.
    predecessors: tokens of the dead owners before; what they have left half written belongs to this
    owner.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    token: _Token
    host: _Word
    machine: _Word = ""
    pid: int
    started: _Word = ""
    slurm_job: _Word = ""
    slurm_restart: int = 0
    predecessors: list[_Token] = []

    @classmethod
    def this_process(cls) -> Owner:
        """An owner with a new token."""
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        return cls(
            token=secrets.token_hex(8),
            host=socket.gethostname()[:256],
            machine=_machine(),
            pid=os.getpid(),
            started=_start_of(os.getpid()),
            slurm_job=os.environ.get("SLURM_JOB_ID", "")[:256],
            slurm_restart=int(restart) if restart.isdecimal() and len(restart) < 9 else 0,
        )

    def after(self, dead: Owner | None) -> Owner:
        """This owner as the successor of `dead`."""
        tokens = [*dead.predecessors, dead.token] if dead else []
        return self.model_copy(
            update={"predecessors": [*self.predecessors, *tokens][-_KEPT_PREDECESSORS:]}
        )

    def fate(self, asking: Owner) -> str:
        """What `asking` knows of this owner: "alive", "dead" or "unknown"."""
        if self.machine and self.machine == asking.machine:
            return "alive" if self.started and _start_of(self.pid) == self.started else "dead"
        restarted = (
            self.slurm_job
            and self.slurm_job == asking.slurm_job
            and self.slurm_restart < asking.slurm_restart
        )
        return "dead" if restarted else "unknown"

    def __str__(self) -> str:
        job = f"Slurm job {self.slurm_job}, " if self.slurm_job else ""
        return f"{job}process {self.pid} on {self.host}"


def _machine() -> str:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _start_of(pid: int) -> str:
    """When a process of this machine began, in ticks since the machine did; "" if there is no such
    process, or it has ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZXx" else fields[19]


@dataclass
class Lock:
    """The lock of `folder` in the hands of this process."""

    folder: Path
    owner: Owner
    _stop: threading.Event = field(default_factory=threading.Event)
    # when this process has last looked after it
    _renewed: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> Path:
        return self.folder / NAME

    @property
    def tokens(self) -> frozenset[str]:
        """The tokens of all saves whose remains belong to this job."""
        return frozenset([self.owner.token, *self.owner.predecessors])

    def check(self) -> None:
        """Raises `Lost` where another job holds the lock; where there is none any more, this
        process takes it again.

        Somebody may have removed the whole folder: then it is made again. But where this process
        was stopped for so long that another job may have taken the lock, saved, and given it up
        since, the lock is lost. Raises `OSError` where the folder cannot be made.
        """
        holder = _read(self.path)
        if holder is None and not self.path.exists():
            if self._was_stopped():
                raise Lost(
                    f"this process did not run for more than {STALE_S:.0f} s, and its lock of "
                    f"{self.folder} is gone"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            if _create(self.path, self.owner):
                return
        holder = _read(self.path)
        if holder is None or holder.token != self.owner.token:
            raise Lost(
                f"the folder {self.folder} now belongs to another job ({holder or 'unknown'})"
            )
        self._renewed = time.monotonic()

    def beat(self) -> None:
        """Renews the lock every `BEAT_S` seconds, until it is released or lost; in a thread."""
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):
                holder = _read(self.path)
                if holder is not None and holder.token != self.owner.token:
                    return
                if holder is None and self._was_stopped():
                    return
                self._renewed = time.monotonic()
                os.utime(self.path)

    def _was_stopped(self) -> bool:
        """Whether the lock was not renewed for so long that another job may have taken it."""
        return time.monotonic() - self._renewed > STALE_S

    def release(self) -> None:
        """Gives the lock up; does nothing where it is another's."""
        self._stop.set()
        holder = _read(self.path)
        if holder is not None and holder.token == self.owner.token:
            with contextlib.suppress(OSError):
                self.path.unlink()


_held: dict[Path, Lock] = RUNTIME.of_process({})


def acquire(folder: Path) -> Lock:
    """Takes the lock of `folder` for this process, which keeps it until it ends.

    Waits up to `STALE_S` seconds where nothing is known of the owner but that its lock is not
    renewed.

    Raises `ConfigError` in one line where another job that lives holds it, `OSError` where the
    folder cannot be written to.
    """
    folder = folder.absolute()
    lock = held(folder)
    if lock is not None:
        lock.check()
        return lock
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder, _wait_for(folder / NAME, Owner.this_process()))
    _held[folder] = lock
    threading.Thread(target=lock.beat, name="cp_ring lock", daemon=True).start()
    return lock


def held(folder: Path) -> Lock | None:
    """The lock of `folder` if this process holds it, else None."""
    lock = _held.get(folder.absolute())
    return lock if lock is not None and lock.owner.pid == os.getpid() else None


def release_all() -> None:
    """Gives up every lock of this process."""
    for folder in [folder for folder in _held if held(folder)]:
        _held.pop(folder).release()


atexit.register(release_all)


def _wait_for(path: Path, mine: Owner) -> Owner:
    """Makes the lock file as soon as nobody who lives holds it; returns the owner that it names."""
    # time of the file, and since when we have seen it unchanged
    watched: tuple[int, float] | None = None
    while not _create(path, mine):
        holder = _read(path)
        fate = holder.fate(mine) if holder else "unknown"
        try:
            beat = path.stat().st_mtime_ns
        except FileNotFoundError:
            continue
        if watched is None and fate == "unknown":
            watched = (beat, time.monotonic())
            note(
                f"{path}: waiting for a sign of life of its owner ({holder or 'unknown'}), "
                f"{STALE_S:.0f} s at most"
            )
        if fate == "alive" or (watched is not None and beat != watched[0]):
            raise ConfigError(
                f"--save {path.parent}: another job writes its checkpoints there "
                f"({holder or 'unknown'}): give another folder, or end that job first"
            )
        silent = (
            watched is not None
            and time.monotonic() - watched[1] > 2 * BEAT_S
            and _age(path) > STALE_S
        )
        if fate == "dead" or silent:
            mine = mine.after(holder)
            _remove(path, holder)
        else:
            time.sleep(BEAT_S / 10)
    return mine


def _read(path: Path) -> Owner | None:
    """The owner that the lock file names; None where there is no file, or one that cp_ring has not
    written.
    """
    try:
        return Owner.model_validate(files.read_json(path, 1 << 16))
    except (OSError, ValueError, ValidationError):
        return None


def _create(path: Path, owner: Owner) -> bool:
    """Makes the lock file, whole and only if there is none; whether it did."""
    text = owner.model_dump_json(indent=1)
    aside = _write_beside(path, text)
    try:
        os.link(aside, path)
        return True
    except FileExistsError:
        # over NFS the answer to a link that was made can be lost, and the repeated call fails
        return aside.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
        with contextlib.suppress(FileExistsError):  # a file system without hard links
            files.write_new(path, text)
            return True
        return False
    finally:
        aside.unlink(missing_ok=True)


def _write_beside(path: Path, text: str) -> Path:
    aside = files.beside(path)
    files.write_new(aside, text)
    return aside


def _age(path: Path) -> float:
    """Seconds since the lock was renewed, by the clock of the file system; 0 where it is gone."""
    probe = _write_beside(path, "")
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def _remove(path: Path, judged: Owner | None) -> None:
    """Removes the lock of the owner that was found dead, but not one that somebody else has made in
    the meantime.
    """
    aside = files.beside(path)
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    holder = _read(aside)
    if (holder.token if holder else "") != (judged.token if judged else ""):
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)
