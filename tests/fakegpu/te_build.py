"""Builds TransformerEngine for the fake GPU from the package index into .cache/fakegpu: its library
as published, its torch extension from the source distribution, by g++ alone.

python -m tests.fakegpu.te_build [VERSION ...]      prints the folders

All sources of the extension are one unit of compilation, so that torch's headers are read once: a
minute of one core in place of half an hour.
"""

import os
import shutil
import sys
import sysconfig
import tarfile
import tempfile
from importlib.metadata import version as version_of
from pathlib import Path

import torch

from tests.fakegpu.build import CACHE, Missing, includes, run, wheels

VERSION = "2.20.2"  # the newest
CUDNN = "9.28.1.4"  # the newest
# What its import needs, and what no package of the tests brings.
IMPORTED = ("onnxscript", "onnx", "onnx_ir", "ml_dtypes", "nvidia-cudnn-frontend")
CCCL = "nvidia-cuda-cccl==13.0.*"  # headers of CUDA's that no wheel of torch's brings


def place(version):
    """Where `build` puts it."""
    return CACHE / f"transformer-engine-{version}-torch-{version_of('torch')}"


def build(version):
    """A folder for PYTHONPATH, made once. Raises `Missing` where it cannot be built."""
    nvidia = wheels()
    if shutil.which("g++") is None:
        raise Missing("not installed: g++")
    found = place(version)
    if found.exists():
        return found
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        work = Path(folder)
        site = work / "site"
        _pip("install", "--target", str(site), "transformer_engine_cu13==" + version)
        _pip("install", "--target", str(work / "python"), "transformer_engine==" + version)
        shutil.copytree(work / "python", site, dirs_exist_ok=True)
        _pip("install", "--target", str(site), *IMPORTED)
        _pip("install", "--target", str(work / "cccl"), CCCL)
        _pip("download", "--no-binary", ":all:", "--no-build-isolation", "--dest", folder,
             "transformer_engine_torch==" + version)  # fmt: skip
        source = _unpacked(work)
        headers = next((work / "cccl" / "nvidia").rglob("nv/target")).parents[1]
        _extension(source, site, [*includes(nvidia), headers], nvidia)
        name = f"transformer_engine_torch-{version}"
        about = site / f"{name}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: transformer_engine_torch\nVersion: {version}\n")
        if not found.exists():  # another process may have been faster
            site.rename(found)
    return found


def cudnn(version):
    """The folder of cuDNN's libraries of a version, got once. Raises `Missing`."""
    place = CACHE / f"cudnn-{version}"
    if not place.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            try:
                _pip("install", "--target", f"{folder}/site", f"nvidia-cudnn-cu13=={version}")
            except RuntimeError as error:
                raise Missing(f"pip has no cuDNN {version}: {error}"[:300]) from None
            Path(folder, "site").rename(place)
    return place / "nvidia" / "cudnn" / "lib"


def _pip(command, *arguments):
    run(sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--no-deps",
        *arguments)  # fmt: skip


def _unpacked(work):
    with tarfile.open(next(work.glob("transformer_engine_torch-*.tar.gz"))) as archive:
        archive.extractall(work / "source", filter="data")
    return next((work / "source").iterdir())


def _extension(source, site, headers, nvidia):
    code, common = source / "csrc", source / "common_headers"
    unit, made = source / "unit.cpp", source / "unit.o"
    unit.write_text("".join(f'#include "{x}"\n' for x in sorted(code.rglob("*.cpp"))))
    of_torch = Path(torch.__path__[0])
    folders = [
        common, common / "common", common / "common" / "include", code,
        of_torch / "include", of_torch / "include" / "torch" / "csrc" / "api" / "include",
        *headers, Path(sysconfig.get_path("include")),
    ]  # fmt: skip
    run("g++", "-std=c++20", "-O0", "-w", "-fPIC", "-fvisibility=hidden",
        "-DTORCH_EXTENSION_NAME=transformer_engine_torch", "-DTORCH_API_INCLUDE_EXTENSION_H",
        *(f"-I{folder}" for folder in folders), "-c", str(unit), "-o", str(made))  # fmt: skip
    libraries = {
        of_torch / "lib": ("c10", "torch", "torch_cpu", "torch_python", "c10_cuda", "torch_cuda"),
        site / "transformer_engine" / "wheel_lib": (":libtransformer_engine.so",),
        nvidia / "cu13" / "lib": (":libcudart.so.13", ":libcublas.so.13"),
        nvidia / "nccl" / "lib": (":libnccl.so.2",),
        nvidia / "cudnn" / "lib": (":libcudnn.so.9",),
    }
    links = [
        x for folder, names in libraries.items() for x in (f"-L{folder}", *map("-l".__add__, names))
    ]
    ending = sysconfig.get_config_var("EXT_SUFFIX")
    run("g++", "-shared", str(made), *links, "-Wl,--allow-shlib-undefined", "-o",
        os.fspath(site / f"transformer_engine_torch{ending}"))  # fmt: skip


if __name__ == "__main__":
    try:
        for each in sys.argv[1:] or [VERSION]:
            print(build(each))
    except Missing as missing:
        sys.exit(f"fakegpu: {missing}")
