"""Builds the fake CUDA libraries with gcc into .cache/fakegpu, once for each state of the sources.

python -m tests.fakegpu.build      prints the folder
"""

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache" / "fakegpu"
LIBRARIES = {  # the names by which programs load them, and the sources
    "libcudart.so.13": "cudart.c",
    "libcuda.so.1": "cuda.c",
    "libnccl.so.2": "nccl.c",
    "libcublas.so.13": "cublas.c",
    "libcublasLt.so.13": "cublas.c",
    "libfakecudnn.so": "cudnn.c",
}
NEWER = {"libcublasLt.so.13": {"cublasLtGroupedMatrixLayoutInit_internal"}}
"""Functions of later libraries, which TransformerEngine 2.14 links and calls for grouped products."""


class Missing(Exception):
    """What this machine lacks for the libraries, in one line."""


def wheels():
    """The folder of NVIDIA's wheels, which torch's CUDA build installs. Raises `Missing`."""
    for place in _folders("nvidia"):
        if (place / "cu13" / "lib" / "libcudart.so.13").exists():
            return place
    raise Missing("no torch for CUDA 13 is installed here")


def _folders(package):
    spec = importlib.util.find_spec(package)
    return [Path(each) for each in (spec and spec.submodule_search_locations) or ()]


def includes(nvidia):
    """Folders of headers: CUDA's, cuDNN's and NCCL's, and Triton's, which has CUDA's crt/ too."""
    of_triton = [each / "backends" / "nvidia" / "include" for each in _folders("triton")]
    folders = [*(nvidia / name / "include" for name in ("cu13", "cudnn", "nccl")), *of_triton]
    for header in ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h", "cudnn.h", "nccl.h"):
        if not any((folder / header).exists() for folder in folders):
            raise Missing(f"no header {header} in the wheels of NVIDIA and Triton")
    return folders


def build():
    """The folder of the built libraries. Raises `Missing` where they cannot be built."""
    for program in ("gcc", "nm"):
        if shutil.which(program) is None:
            raise Missing(f"not installed: {program}")
    nvidia = wheels()
    folders = includes(nvidia)
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted((HERE / "csrc").iterdir()):
        digest.update(source.read_bytes())
    digest.update(repr(folders).encode())
    place = CACHE / digest.hexdigest()[:16]
    if place.exists():
        return place
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        made = Path(work) / "made"
        made.mkdir()
        for name, source in LIBRARIES.items():
            _library(made, Path(work), name, source, folders, nvidia)
        if not place.exists():  # another process may have been faster
            shutil.copytree(made, Path(work) / "copy")
            (Path(work) / "copy").rename(place)
    return place


def _library(made, work, name, source, includes, nvidia):
    include = [f"-I{folder}" for folder in includes]
    own, stubs, versions = (work / f"{name}{end}" for end in (".o", "_stubs.c", ".map"))
    if name == "libcublasLt.so.13":
        include.append("-DLT")
    run("gcc", "-O1", "-w", "-fPIC", *include, "-c", str(HERE / "csrc" / source), "-o", str(own))
    defined = _symbols(own)
    missing = sorted(_names(name, nvidia, includes) - defined)
    aliases = [each for each in missing if re.sub(r"_v\d+$", "", each) in defined]
    lines = [f'#include "{HERE / "csrc" / "fake.h"}"']
    lines += [
        f'int {x}(void) {{ LOG("stub {x}"); return 0; }}' for x in missing if x not in aliases
    ]
    stubs.write_text("\n".join(lines) + "\n")
    # the version of its symbols, without which the loader warns
    versions.write_text(f"{name} {{ global: *; }};\n")
    same = [f"-Wl,--defsym={each}={re.sub(r'_v[0-9]+$', '', each)}" for each in aliases]
    flags = [f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}"]
    if name == "libfakecudnn.so":
        flags = []
    run("gcc", "-O1", "-w", "-fPIC", "-shared", str(own), str(stubs), *flags, *same, "-ldl",
         "-lpthread", "-o", str(made / name))  # fmt: skip


def _names(library, nvidia, includes):
    """The functions that programs may want of a library: those of the real one or its header."""
    if library == "libcuda.so.1":
        header = next(x for x in includes if (x / "cuda.h").exists()) / "cuda.h"
        names = set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w+)\s*\(", header.read_text()))
        plain = {re.sub(r"_v\d+$", "", name) for name in names}
        return plain | {name + end for name in plain for end in ("_v2", "_v3")}
    real = {
        "libcudart.so.13": nvidia / "cu13" / "lib" / "libcudart.so.13",
        "libnccl.so.2": nvidia / "nccl" / "lib" / "libnccl.so.2",
        "libcublas.so.13": nvidia / "cu13" / "lib" / "libcublas.so.13",
        "libcublasLt.so.13": nvidia / "cu13" / "lib" / "libcublasLt.so.13",
    }
    found = _symbols(real[library], "-D") if library in real else set()
    return found | NEWER.get(library, set())


def _symbols(path, *options):
    """The functions that a file defines."""
    text = run("nm", *options, "--defined-only", str(path))
    found = re.findall(r" [TW] (\w+)", text)
    return {name for name in found if not name.startswith("_") or name.startswith("__cuda")}


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(build())
    except Missing as missing:
        sys.exit(f"fakegpu: {missing}")
