"""The wheel alone, away from the checkout, has the command line, patches, configs and launch."""

import json
import os
import runpy
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import setuptools.command.build  # noqa: F401

from tests.rank_pool import python

pytestmark = pytest.mark.ci
ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
FOLDERS = ("cp_ring", "patches", "configs", "launch")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the wheel is unpacked; built from a copy, so that the checkout stays as
    it is.
    """
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    pip = "-m pip --quiet --disable-pip-version-check wheel --no-deps --no-build-isolation -w"
    python(*pip.split(), str(work), str(source), check=True)
    (wheel,) = work.glob("cp_ring-*.whl")
    assert not (source / "build").exists()
    zipfile.ZipFile(wheel).extractall(work / "target")
    shutil.rmtree(source)
    return work / "target"


MADE = ("runs", "site", "build", "dist", "__pycache__")  # beside hidden files, what is no source


PROGRAM = """
import contextlib, io, json
import cp_ring, cp_ring.configs, cp_ring.tools.job, cp_ring.launch, cp_ring.patches
from cp_ring.tools.cli import app

files = [module.__file__ for module in (cp_ring, cp_ring.patches, cp_ring.configs, cp_ring.launch, cp_ring.tools.job)]
patches = [line["name"] for line in cp_ring.patches.table()]
with contextlib.redirect_stdout(io.StringIO()) as shown:
    app(["train", "quickstart", "--dry-run", "--set", "data.path=texts"], standalone_mode=False)
print(json.dumps({"files": files, "patches": patches, "dry run": shown.getvalue()}))
"""


@pytest.fixture(scope="module")
def told(installed, tmp_path_factory):
    """What a program in another folder finds, where the installed wheel comes before everything
    else.
    """
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (elsewhere / "texts" / name).write_text(name)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = python("-c", PROGRAM, cwd=elsewhere, env=environment)
    assert done.returncode == 0, done.stderr
    return {"folder": elsewhere, **json.loads(done.stdout.splitlines()[-1])}


def test_packages_come_from_the_wheel(installed, told):
    assert [Path(file) for file in told["files"]] == [
        installed / "cp_ring" / "__init__.py",
        *(
            installed / "cp_ring" / name / "__init__.py"
            for name in ("patches", "configs", "launch")
        ),
        installed / "cp_ring" / "tools" / "job.py",
    ]


def test_the_source_distribution_passes_its_tests(tmp_path):
    build = "from setuptools import build_meta; print(build_meta.build_sdist({!r}))"
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=lambda folder, names: [
        name for name in names if name in MADE or (name.startswith(".") and name != ".ci")
    ])  # fmt: skip
    python("-c", build.format(str(tmp_path)), cwd=source, check=True)
    (archive,) = tmp_path.glob("cp_ring-*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")

    def files(folder):
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    missing = {name for name in files(source) - files(unpacked) if ".egg-info" not in name}
    assert not missing
    tests = "-m pytest -q -n 0 -p no:cacheprovider tests/plan/test_mask.py tests/docs/test_site.py"
    done = python(*tests.split(), cwd=unpacked)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("folder", ["checkout", "elsewhere"])
@pytest.mark.parametrize(
    "command, line",
    [
        ("cp_ring.run nothere.py", "nothere.py does not exist"),
        ("cp_ring.tools train nothere.yaml", "nothere.yaml: no such file, nor one of the packaged"),
    ],
)
def test_what_is_installed_works_in_the_checkout_too(installed, tmp_path, folder, command, line):
    """There the folder of the checkout hides the installed package, which an editable one finds."""
    paths = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    where = ROOT if folder == "checkout" else tmp_path
    found = {"PYTHONPATH": paths, "PATH": os.environ["PATH"]}
    done = python("-S", "-m", *command.split(), cwd=where, env=found)
    assert done.returncode == 2 and done.stderr.startswith(f"cp_ring: error: {line}"), done.stderr


def test_an_old_python_is_named_before_any_dependency(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    monkeypatch.setattr(sys, "version", "3.11.7 (main)")
    with pytest.raises(SystemExit, match=r"needs Python 3\.12 or later; this is 3\.11\.7$"):
        runpy.run_path(str(ROOT / "setup.py"))


def test_every_module_and_data_file_is_in_the_wheel(installed):
    def modules(folder):
        return {str(file.relative_to(folder)) for file in folder.rglob("*.py")}

    wanted = modules(ROOT / "cp_ring")
    for name in FOLDERS[1:]:
        wanted |= {f"{name}/{module}" for module in modules(ROOT / name)}
    assert modules(installed / "cp_ring") == wanted
    data = [*ROOT.glob("configs/*.yaml"), *ROOT.glob("launch/slurm/*"), ROOT / "cp_ring/py.typed"]
    for file in data:
        name = file.relative_to(ROOT / "cp_ring" if file.name == "py.typed" else ROOT)
        assert (installed / "cp_ring" / name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "words, shown",
    [
        ("--version", "cp_ring 0."),
        ("doctor", "patches"),
        ("plan --seq-length 65536 --cp 8", "proven"),
    ],
)
def test_commands_run_where_only_the_wheel_is(installed, told, words, shown):
    """The command that pip would install: `cp_ring.tools.main`."""
    command = ["-c", "from cp_ring.tools import main; main()", *words.split()]
    found = {**os.environ, "PYTHONPATH": str(installed)}
    done = python(*command, cwd=told["folder"], env=found)
    assert done.returncode == 0 and shown in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def test_dry_run_from_another_folder(told):
    assert (
        "-m cp_ring.pretrain_gpt" in told["dry run"]
        and "--context-parallel-size 2" in told["dry run"]
    )
    assert str(told["folder"] / "runs" / "quickstart" / "checkpoints") in told["dry run"]
