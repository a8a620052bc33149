"""launch/env.sh: the Python that it chooses, and what it does with an environment that is complete or was interrupted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
TOOLS = ("bash", "cat", "cut", "dirname", "mkdir", "mv", "rm", "sha256sum", "touch")


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    """A machine with a PATH of a few tools only, an empty home, and a checkout; returns a function that runs bash on it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))
    root = tmp_path / "checkout"
    (root / "launch").mkdir(parents=True)
    for name in ("env.sh", "constraints.txt"):
        shutil.copy(LAUNCH / name, root / "launch" / name)
    (root / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "home").mkdir()

    def run(command):
        return subprocess.run(
            [shutil.which("bash"), "-euo", "pipefail", "-c", f"source launch/env.sh; {command}"],
            cwd=root,
            env={"PATH": str(tools), "HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            timeout=60,
        )

    run.tools, run.root, run.home = tools, root, tmp_path / "home"
    return run


FAILING_SHIM = "echo 'pyenv: python3.12: command not found' >&2; exit 127"
TOO_OLD = "exit 1"  # what the version check of an old interpreter gives


def test_no_python_is_one_clear_line(machine):
    script(machine.tools / "python3.12", FAILING_SHIM)
    script(machine.tools / "python3", TOO_OLD)
    done = machine('prepare_environment ""')
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1 and "cp_ring: error: no Python >= 3.12" in done.stderr
    assert not (machine.root / ".venv" / "bin").exists()


@pytest.mark.parametrize(
    "place", ["bin/python3", "home/.pyenv/versions/3.12.9/bin/python3", "home/.pyenv/versions/3.13.0/bin/python3"]
)
def test_a_failing_shim_is_passed_over(machine, place):
    script(machine.tools / "python3.12", FAILING_SHIM)
    real = machine.root.parent / place
    script(real, f'exec "{sys.executable}" "$@"')
    done = machine("find_python")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (str(real), "python3") and (done.stdout.strip() == "python3") == (place == "bin/python3")


def test_3_12_is_preferred(machine):
    for name in ("python3.13", "python3", "python3.12"):
        script(machine.tools / name, f'exec "{sys.executable}" "$@"')
    assert machine("find_python").stdout.strip() == "python3.12"


def test_outside_a_checkout_is_one_clear_line(machine):
    (machine.root / "pyproject.toml").unlink()
    done = machine('prepare_environment ""')
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1 and "run: cp-ring train quickstart" in done.stderr


@pytest.fixture
def installer(machine):
    """A Python whose `-m venv` and `-m pip` only write down that they were called; pip fails while `fail` exists."""
    log = machine.root / "calls"
    target = 'while (($#)); do [[ "$1" != --target ]] || mkdir -p "$2"; shift; done'
    inner = f'echo "pip $*" >> "{log}"; {target}; [[ ! -e "{machine.root}/fail" ]]'
    script(machine.root / "python-of-venv", inner)
    outer = f"""
case "$1 ${{2:-}}" in
  "-m venv") echo venv >> "{log}"; mkdir -p "$3/bin"; cp "{machine.root}/python-of-venv" "$3/bin/python" ;;
  --version*) echo Python 3.12.0 ;;
esac"""
    script(machine.tools / "python3.12", outer)
    (machine.tools / "cp").symlink_to(shutil.which("cp"))

    def calls():
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line.split()[0] for line in lines]

    machine.calls = calls
    return machine


def test_complete_environment_is_reused(installer):
    for _ in range(2):
        assert installer('prepare_environment ""').returncode == 0
    assert installer.calls() == ["venv", "pip"]


def test_test_extra_is_added_once_and_serves_both(installer):
    for extras in ("", "[test]", "[test]", ""):
        assert installer(f'prepare_environment "{extras}"').returncode == 0
    assert installer.calls() == ["venv", "pip", "pip"]


@pytest.mark.parametrize("changed", ["pyproject.toml", "launch/constraints.txt"])
def test_changed_requirements_are_installed_again(installer, changed):
    installer('prepare_environment ""')
    with (installer.root / changed).open("a") as file:
        file.write("# changed\n")
    installer('prepare_environment ""')
    assert installer.calls() == ["venv", "pip", "pip"]


def test_interrupted_installation_is_made_anew(installer):
    (installer.root / "fail").touch()
    assert installer('prepare_environment ""').returncode != 0
    leftover = installer.root / ".venv" / "half-installed"
    leftover.touch()
    (installer.root / "fail").unlink()
    done = installer('prepare_environment ""')
    assert done.returncode == 0 and "interrupted" in done.stdout
    assert not leftover.exists() and installer.calls() == ["venv", "pip", "venv", "pip"]


def test_shellcheck():
    needs.programs("shellcheck")
    scripts = [str(path) for path in sorted(LAUNCH.glob("*.sh"))] + [str(LAUNCH.parent / ".ci" / "run")]
    done = subprocess.run(["shellcheck", "-x", *scripts], cwd=LAUNCH.parent, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout


def test_another_megatron_is_installed_once_and_anew_where_it_was_interrupted(installer):
    installer('prepare_environment ""')
    place = installer.root / ".compat" / "0.17.1"
    (installer.root / "fail").touch()
    assert installer("prepare_compat 0.17.1").returncode != 0 and not place.exists()
    (installer.root / "fail").unlink()
    for _ in range(2):
        assert installer("prepare_compat 0.17.1").returncode == 0
        assert [folder.name for folder in place.parent.iterdir()] == ["0.17.1"]
    assert installer.calls() == ["venv", "pip", "pip", "pip"]


PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "shellcheck", "ip")


def system(machine, root=True, apt="exit 0"):
    """The run of prepare_system on a machine with an apt-get that writes its calls down, and those calls."""
    log = machine.root / "apt-calls"
    script(machine.tools / "id", f"echo {0 if root else 1000}")
    if apt:
        script(machine.tools / "apt-get", f'echo "$*" >> "{log}"; {apt}')
    done = machine("prepare_system; echo went on")
    assert done.returncode == 0 and done.stdout.endswith("went on\n")
    return done, log.read_text().splitlines() if log.exists() else []


def test_what_tests_need_is_installed_once(machine):
    done, calls = system(machine)
    assert calls[0] == "-qq update" and "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge" in calls[1]
    assert "installing slurmctld" in done.stdout and not done.stderr
    for name in PROGRAMS:
        script(machine.tools / name, "exit 0")
    done, again = system(machine)
    assert again == calls and done.stdout == "went on\n"


@pytest.mark.parametrize("how", [{"root": False}, {"apt": "exit 100"}, {"apt": ""}])
def test_tests_go_on_with_a_notice_where_it_cannot_be_installed(machine, how):
    for name in PROGRAMS[:-1]:
        script(machine.tools / name, "exit 0")
    done, calls = system(machine, **how)
    assert done.stderr == "cp_ring: not installed, so that the tests that need them are skipped: ip\n"
    assert bool(calls) == (how.get("apt") == "exit 100")


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_program_skips_a_test_and_fails_it_in_ci(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    needs.programs("bash")
    with pytest.raises(outcome, match=r"not installed: no-such-program"):
        needs.programs("bash", "no-such-program")


def test_constraints_name_no_host_or_path():
    for line in (LAUNCH / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or (line.count("==") == 1 and "/" not in line and "@" not in line), line
