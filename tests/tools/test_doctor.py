"""`cp-ring doctor`: a good installation, and one where everything that can be wrong is wrong."""

import os
from pathlib import Path

import pytest

from cp_ring.tools import doctor
from tests.rank_pool import python

BROKEN = "libcudnn.so.9: cannot open shared object file: No such file or directory"


def run(path=""):
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return python("-m", "cp_ring.tools", "doctor", env=environment)


def package(folder, name, text=""):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    return folder / name


def test_a_good_installation_is_good():
    done = run()
    assert done.returncode == 0 and "problem: " not in done.stdout, done.stderr
    shown = {line.split()[0]: line for line in done.stdout.splitlines() if line[0] == " "}
    for name in ("python", "torch", "megatron-core", "cpu", "reference", "core_attention"):
        assert ": " not in shown[name], name
    names = "CUDA", "TransformerEngine", "flash-attn", "Apex", "Triton", "Slurm"
    assert {*names} <= shown.keys()
    for section in ("versions", "machine", "kernels", "patches"):
        assert f"{section}:\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """A folder to put first on PYTHONPATH."""
    folder = tmp_path_factory.mktemp("bad")
    package(folder, "transformer_engine", f"print('loading')\nraise OSError({BROKEN!r})")
    package(
        folder,
        "flash_attn",
        "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi')",
    )
    package(folder / "apex", "lib")
    (folder / "apex" / "__init__.py").write_text("raise SystemExit('a web toolkit was imported')")
    (package(folder / "megatron", "core") / "package_info.py").write_text("__version__ = '0.12.3'")
    return folder


def test_each_problem_is_one_line_that_says_what_to_do(bad):
    done = run(path=bad)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "loading" not in done.stdout
    lines = [line.strip() for line in done.stdout.splitlines() if "problem: " in line]
    assert len(lines) == 4, done.stdout + done.stderr
    megatron, engine, flash, apex = lines
    assert (
        "0.12.3" in megatron
        and ">=0.18.2,<0.21" in megatron
        and "pip install 'megatron-core[training]" in megatron
    )
    assert (
        engine.startswith("TransformerEngine")
        and BROKEN in engine
        and "pip uninstall transformer-engine" in engine
    )
    assert (
        flash.startswith("flash-attn")
        and "undefined symbol" in flash
        and "pip uninstall flash-attn" in flash
    )
    assert apex.startswith("Apex") and "not NVIDIA's" in apex and "pip uninstall apex" in apex


@pytest.mark.parametrize("name, left", [("torch", "machine"), ("transformer_engine", "patches")])
def test_what_a_broken_package_hides_is_a_line(tmp_path, name, left):
    """Megatron imports TransformerEngine, and expects no OSError."""
    package(tmp_path, name, f"raise OSError({BROKEN!r})")
    done = run(path=tmp_path)
    assert done.returncode == 1, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if BROKEN in line}
    assert "problem: not examined: OSError: " in lines.pop(left) and lines


def test_it_needs_the_standard_library_alone(tmp_path):
    """As after `pip install --no-deps`; other commands end in one line."""
    folder = tmp_path / "cp_ring-0.1.0.dist-info"
    folder.mkdir()
    needs = "numpy>=1.26", "torch>=2.11,<2.16", "typer>=0.12; extra == 'tools'"
    lines = ["Name: cp-ring", "Version: 0.1.0", *(f"Requires-Dist: {need}" for need in needs)]
    (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))
    package = Path(doctor.__file__).parents[2]
    for command in ("doctor", "train quickstart"):
        words = ["-S", "-m", "cp_ring.tools", *command.split()]
        done = python(*words, env={"PYTHONPATH": f"{tmp_path}:{package}"}, cwd=tmp_path)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        said = (done.stdout + done.stderr).splitlines()
        if command == "doctor":
            for need in ("numpy>=1.26", "torch>=2.11,<2.16", "typer>=0.12"):
                assert any(f"not installed: pip install '{need}'" in line for line in said), need
        else:
            assert len(said) == 1 and "needs the package" in said[0], said


def test_nvidias_apex_is_told_from_the_other_by_what_it_holds(tmp_path, monkeypatch):
    from cp_ring.megatron import compat

    monkeypatch.syspath_prepend(tmp_path)
    assert compat.apex() in ("", "nvidia")
    package(tmp_path, "apex")
    assert compat.apex() == "other"
    (tmp_path / "apex" / "multi_tensor_apply").mkdir()
    assert compat.apex() == "nvidia"


@pytest.mark.parametrize(
    "requirement, advice",
    [
        ("nosuchpackage>=2", "not installed: pip install 'nosuchpackage>=2'"),
        ("numpy<1", "cp_ring needs <1: pip install 'numpy<1'"),
        ("nosuchpackage>=2; extra == 'te'", None),
    ],
)
def test_what_cp_ring_needs_is_checked_against_its_own_requirements(
    monkeypatch, requirement, advice
):
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: [requirement])
    wrong = [text for _, text in doctor._requirements() if text.startswith("problem: ")]
    assert len(wrong) == (advice is not None)
    assert all(text.endswith(advice) for text in wrong)


def test_a_kernel_that_cannot_be_asked_is_a_finding(monkeypatch):
    import cp_ring.kernels

    monkeypatch.setattr(
        cp_ring.kernels, "REGISTRY", {"flash": "no.such.module", "cpu": "cp_ring.kernels.cpu"}
    )
    flash, cpu = doctor._kernels()
    assert flash[1].startswith("absent: ") and "ModuleNotFoundError" in flash[1]
    assert cpu == ("cpu", "usable on cpu")


def test_groups_without_priority_are_told_on_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for value, said in (("0", "absent: messages of your own groups"), ("1", "1")):
        monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", value)
        assert dict(doctor._machine())["TORCH_NCCL_HIGH_PRIORITY"].startswith(said)
