"""Network namespaces on this machine, each two joined by a wire of their own, whose speed can be
set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from cp_ring.errors import ConfigError, one_line

_TOOLS = ("ip", "tc", "nsenter")


class Network(NamedTuple):
    """The network of a rank: its namespace, as a path under /proc, and its interface to the other
    ranks.
    """

    namespace: str
    interface: str


class NoNamespacesError(ConfigError):
    """Why this machine or user cannot make network namespaces."""


class ThrottledMesh:
    """`size` network namespaces, `ends`; each two of them are joined by a veth pair of their own.

    The namespaces have no names. So they end with this object, or with the process, even if it is
    killed. End number i has the address 10.0.0.(i + 1), and reaches end number j by its device
    `cpj`. Raises `NoNamespacesError`.
    """

    def __init__(self, size: int) -> None:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise NoNamespacesError(
                f"a throttled link needs {', '.join(missing)}, not found (packages iproute2, "
                "util-linux)"
            )
        if os.geteuid() != 0:
            raise NoNamespacesError("a throttled link needs root, to make network namespaces")
        self._files: list[int] = []
        try:
            # Only a thread enters the new namespace, not this process. The open file keeps the
            # namespace alive.
            for _ in range(size):
                with ThreadPoolExecutor(1) as thread:
                    self._files.append(thread.submit(_new_namespace).result())
            paths = [f"/proc/{os.getpid()}/fd/{file}" for file in self._files]
            self.ends = [
                Network(path, f"cp{0 if place else 1}") for place, path in enumerate(paths)
            ]
            for place, end in enumerate(self.ends):
                later = range(place + 1, size)
                _run_inside(
                    end,
                    "ip",
                    [
                        f"link add cp{other} type veth peer name cp{place} netns {paths[other]}"
                        for other in later
                    ],
                )
            for place, end in enumerate(self.ends):
                _run_inside(end, "ip", _setup(place, size))
        except (OSError, ConfigError) as error:
            self.close()
            raise NoNamespacesError(
                f"a throttled link needs network namespaces: {one_line(error)}"
            ) from None

    def address(self, place: int) -> str:
        return f"10.0.0.{place + 1}"

    def throttle(
        self, bytes_per_second: float | None, sender: int, receiver: int, burst: str = "128k"
    ) -> None:
        """Limits the wire from one end to another by a token bucket (tbf) that lets `burst` pass at
        once; None: no limit.
        """
        end, device = self.ends[sender], f"cp{receiver}"
        _run_inside(end, "tc", [f"qdisc del dev {device} root"], check=False)
        if bytes_per_second:
            # The queue is long enough to drop nothing, because this does not measure how TCP
            # recovers.
            bucket = f"tbf rate {int(8 * bytes_per_second)}bit burst {burst} limit 256m"
            _run_inside(end, "tc", [f"qdisc add dev {device} root {bucket}"])

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


def _setup(place: int, size: int) -> list[str]:
    """Commands of `ip` for an end: the loopback device, by which ranks of one namespace talk, and
    the wires to the others.

    Every rank needs one address for all of its peers. So the address is on one wire only, and
    routes lead to the others.
    """
    others = [other for other in range(size) if other != place]
    lines = [f"address add 10.0.0.{place + 1}/32 dev cp{others[0]}", "link set lo up"]
    lines += [f"link set cp{other} up" for other in others]
    return lines + [
        f"route add 10.0.0.{other + 1}/32 dev cp{other} src 10.0.0.{place + 1}" for other in others
    ]


def _new_namespace() -> int:
    os.unshare(os.CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def enter(network: Network) -> None:
    """Moves this process into the namespace. Call this before the process has threads: each thread
    has its own namespace.
    """
    file = os.open(network.namespace, os.O_RDONLY)
    os.setns(file, os.CLONE_NEWNET)
    os.close(file)


def _run_inside(end: Network, tool: str, lines: Iterable[str], check: bool = True) -> None:
    """Runs lines of `ip` or `tc` in a namespace, in one process."""
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(
        ["nsenter", f"--net={end.namespace}", tool, "-batch", "-"],
        input=text,
        capture_output=True,
        text=True,
    )
    if check and done.returncode:
        raise ConfigError(f"{tool}: {done.stderr}")
