"""Programs on the fake GPUs, each rank in a process of its own, and what they asked of CUDA."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fakegpu import te_build
from tests.fakegpu.build import HERE, LIBRARIES, build, wheels
from tests.fakegpu.log import Log

ROOT = HERE.parents[1]


class ProgramError(AssertionError):
    """A rank failed. The message is what it printed."""


def environment(cudnn=None):
    """Variables with which a process has the fake libraries, and cuDNN of this version in place of
    torch's. Raises `Missing`.
    """
    libraries, nvidia = build(), wheels()
    of_cudnn = te_build.cudnn(cudnn) if cudnn else nvidia / "cudnn" / "lib"
    folders = [libraries, of_cudnn, *(nvidia / name / "lib" for name in ("cu13", "nccl"))]
    preloaded = [*(libraries / name for name in LIBRARIES), of_cudnn / "libcudnn.so.9"]
    return {
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "LD_LIBRARY_PATH": ":".join(map(str, folders)),
        "FAKEGPU_CUDNN": str(preloaded[-1]),
        "CUDNN_HOME": str(of_cudnn),
        "CUDA_HOME": str(nvidia / "cu13"),  # where TransformerEngine looks for libraries
        "TRITON_CACHE_DIR": str(libraries.parent / "triton"),
        # of what TransformerEngine compiles
        "TORCHINDUCTOR_CACHE_DIR": str(libraries.parent / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


class FakeGpus:
    """A server that forks ranks; it starts with the first program. Raises `Missing` where the
    libraries cannot be built.

    transformer_engine: the version of TransformerEngine that ranks can import; None is none. cudnn:
    that of cuDNN; None is torch's.
    """

    def __init__(self, transformer_engine=None, cudnn=None):
        self.transformer_engine = transformer_engine
        paths = [ROOT, *sys.path]
        if transformer_engine is not None:
            paths.append(te_build.build(transformer_engine))
        self._environment = (
            os.environ | environment(cudnn) | {"PYTHONPATH": ":".join(map(str, paths))}
        )
        self._server = None

    def run(self, program, size=1, capability=90, **arguments):
        """Calls the function `module:name` with `arguments` on each of `size` ranks, whose GPUs
        have this compute capability, and returns the ranks' logs. Raises `ProgramError`.
        """
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.fakegpu.server"],
                env=self._environment, cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._server.stdin is not None and self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            task = {
                "program": program, "size": size, "arguments": arguments, "folder": folder,
                "device": str(HERE / "devices" / f"sm_{capability}.json"),
            }  # fmt: skip
            print(json.dumps(task), file=self._server.stdin, flush=True)
            codes = json.loads(self._server.stdout.readline() or "null")
            if codes is None or any(codes):
                texts = [
                    f"rank {rank}:\n{path.read_text()}"
                    for rank, path in ((x, Path(folder) / f"{x}.txt") for x in range(size))
                    if path.exists() and (codes is None or codes[rank])
                ]
                raise ProgramError(f"exit codes {codes}\n" + "\n".join(texts))
            return [Log.read(Path(folder) / f"{rank}.log") for rank in range(size)]

    def close(self):
        """Ends the server."""
        if self._server is not None:
            self._server.communicate()
            self._server = None


def main():
    """Prints shell commands that set `environment()` for an H100, and FAKEGPU_SITE to the folder of
    TransformerEngine if it was built.
    """
    site = [te_build.place(te_build.VERSION)]
    more = {
        "FAKEGPU_DEVICE": str(HERE / "devices" / "sm_90.json"),
        "FAKEGPU_SITE": ":".join(str(each) for each in site[:1] if each.exists()),
    }
    for name, value in (environment() | more).items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
