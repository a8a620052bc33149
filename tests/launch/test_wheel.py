"""The wheel alone, away from the checkout, serves the command line, patches, configs and launch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "cp_ring", "patches", "configs", "launch")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the wheel is installed; built from a copy, so that the checkout stays as it is."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(work), str(source)], check=True)
    (wheel,) = work.glob("cp_ring-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(work / "target"), str(wheel)], check=True)
    shutil.rmtree(source)
    return work / "target"


def python(installed, elsewhere, *arguments):
    """Runs Python in another folder with the installed wheel before everything else."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_packages_come_from_the_wheel(installed, tmp_path):
    code = "import cp_ring, cp_ring.patches, cp_ring.configs, cp_ring.launch, cp_ring.job as j\n"
    code += "for m in (cp_ring, cp_ring.patches, cp_ring.configs, cp_ring.launch, j): print(m.__file__)"
    files = [Path(line) for line in python(installed, tmp_path, "-c", code).splitlines()]
    assert files == [
        installed / "cp_ring" / "__init__.py",
        *(installed / "cp_ring" / name / "__init__.py" for name in ("patches", "configs", "launch", "job")),
    ]


CONFIGS = [f"configs/{path.name}" for path in sorted((ROOT / "configs").glob("*.yaml"))]
LAUNCH = [f"launch/{name}" for name in ("quickstart.sh", "test.sh", "env.sh", "constraints.txt")]


@pytest.mark.parametrize("name", [*CONFIGS, *LAUNCH, "py.typed"])
def test_data_files_are_in_the_wheel(installed, name):
    assert (installed / "cp_ring" / name).stat().st_size > 0 or name == "py.typed"


def test_every_module_is_in_the_wheel(installed):
    def modules(folder):
        return {str(file.relative_to(folder)) for file in folder.rglob("*.py")}

    wanted = modules(ROOT / "cp_ring")
    for name in ("patches", "configs", "launch"):
        wanted |= {f"{name}/{module}" for module in modules(ROOT / name)}
    assert modules(installed / "cp_ring") == wanted


def test_dry_run_from_another_folder(installed, tmp_path):
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text(name)
    arguments = ["-m", "cp_ring.cli", "train", "quickstart", "--dry-run", "--set", "data.path=texts"]
    shown = python(installed, tmp_path, *arguments)
    assert "-m cp_ring.pretrain_gpt" in shown and "--context-parallel-size 2" in shown
    assert str(tmp_path / "runs" / "quickstart" / "checkpoints") in shown


def test_patches_are_found(installed, tmp_path):
    from cp_ring.patches import NAMES

    shown = python(installed, tmp_path, "-c", "import cp_ring.patches as p; print([row['name'] for row in p.table()])")
    assert shown.strip() == str(list(NAMES))
