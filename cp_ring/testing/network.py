"""Two network namespaces on this machine, joined by a wire of a set speed."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from cp_ring.errors import ConfigError

_TOOLS = ("ip", "tc", "nsenter")


class Network(NamedTuple):
    """The network of a rank: its namespace, as a path under /proc, and its interface to the other ranks."""

    namespace: str
    interface: str


class ThrottledLink:
    """Two network namespaces, `ends`, joined by a veth pair.

    The namespaces have no names. So they end with this object, or with the process, even if it is killed. Raises `ConfigError`
    with the reason where this machine or user cannot make them.
    """

    def __init__(self) -> None:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise ConfigError(f"a throttled link needs {', '.join(missing)}, not found (packages iproute2, util-linux)")
        if os.geteuid() != 0:
            raise ConfigError("a throttled link needs root, to make network namespaces")
        self._files: list[int] = []
        try:
            # Only a thread enters the new namespace, not this process. The open file keeps the namespace alive.
            for _ in range(2):
                with ThreadPoolExecutor(1) as thread:
                    self._files.append(thread.submit(_new_namespace).result())
            first, second = (f"/proc/{os.getpid()}/fd/{file}" for file in self._files)
            self.ends = Network(first, "cp0"), Network(second, "cp1")
            _run_inside(self.ends[0], "ip link add cp0 type veth peer name cp1 netns", second)
            for number, end in enumerate(self.ends, 1):
                _run_inside(end, f"ip address add 10.0.0.{number}/24 dev {end.interface}")
                _run_inside(end, f"ip link set {end.interface} up")
                _run_inside(end, "ip link set lo up")  # by which ranks of one namespace talk
        except (OSError, ConfigError) as error:
            self.close()
            raise ConfigError(f"a throttled link needs network namespaces: {' '.join(str(error).split())}") from None

    def throttle(self, bytes_per_second: float | None) -> None:
        """Limits each direction by a token bucket (tbf); None removes the limit."""
        for end in self.ends:
            _run_inside(end, f"tc qdisc del dev {end.interface} root", check=False)
            if bytes_per_second:
                # The queue is long enough to drop nothing, because this does not measure how TCP recovers.
                bucket = f"tbf rate {int(8 * bytes_per_second)}bit burst 128k limit 256m"
                _run_inside(end, f"tc qdisc add dev {end.interface} root {bucket}")

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


def _new_namespace() -> int:
    os.unshare(os.CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def enter(network: Network) -> None:
    """Moves this process into the namespace. Call this before the process has threads: each thread has its own namespace."""
    file = os.open(network.namespace, os.O_RDONLY)
    os.setns(file, os.CLONE_NEWNET)
    os.close(file)


def _run_inside(end: Network, command: str, *more: str, check: bool = True) -> None:
    done = subprocess.run(["nsenter", f"--net={end.namespace}", *command.split(), *more], capture_output=True, text=True)
    if check and done.returncode:
        raise ConfigError(f"{command}: {done.stderr}")
