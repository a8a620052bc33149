"""launch/env.sh: the Python that it chooses, and what it does with an environment that is complete
or was interrupted.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cp_ring.testing.rank_pool import LIMIT_S
from tests import needs

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
TOOLS = ("bash", "cat", "cut", "dirname", "mkdir", "mv", "rm", "sed", "sha256sum", "touch")


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    """A machine with a PATH of a few tools only, an empty home, and a checkout; returns a function
    that runs bash on it.
    """
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
            timeout=LIMIT_S,
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
    "place",
    [
        "bin/python3",
        "home/.pyenv/versions/3.12.9/bin/python3",
        "home/.pyenv/versions/3.13.0/bin/python3",
    ],
)
def test_a_failing_shim_is_passed_over(machine, place):
    script(machine.tools / "python3.12", FAILING_SHIM)
    real = machine.root.parent / place
    script(real, f'exec "{sys.executable}" "$@"')
    done = machine("find_python")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (str(real), "python3") and (done.stdout.strip() == "python3") == (
        place == "bin/python3"
    )


def test_3_12_is_preferred(machine):
    for name in ("python3.13", "python3", "python3.12"):
        script(machine.tools / name, f'exec "{sys.executable}" "$@"')
    assert machine("find_python").stdout.strip() == "python3.12"


def test_outside_a_checkout_is_one_clear_line(machine):
    (machine.root / "pyproject.toml").unlink()
    done = machine('prepare_environment ""')
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1 and "run: cp-ring train quickstart" in done.stderr


PIP = """Collecting torch
  Downloading torch-2.13.0-cp312-manylinux_2_28_x86_64.whl.metadata (30 kB)
Downloading torch-2.13.0-cp312-manylinux_2_28_x86_64.whl (526.1 MB)
Using cached typer-0.12.0-py3-none-any.whl (47 kB)
Installing collected packages: torch, typer"""


@pytest.fixture
def installer(machine):
    """A Python whose `-m venv` and `-m pip` only write down that they were called; pip fails while
    `fail` exists.
    """
    log = machine.root / "calls"
    target = 'while (($#)); do [[ "$1" != --target ]] || mkdir -p "$2"; shift; done'
    inner = f'echo "pip $*" >> "{log}"; {target}; echo "{PIP}"; [[ ! -e "{machine.root}/fail" ]]'
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


def test_an_installation_shows_how_far_it_is(installer):
    done = installer('prepare_environment ""')
    assert done.stdout.splitlines()[-2:] == [
        "cp_ring:   torch (526.1 MB)",
        "cp_ring: all packages are here; unpacking them",
    ]


def test_the_quickstart_ends_with_a_command_that_works_from_any_folder(machine, tmp_path):
    shutil.copy(LAUNCH / "quickstart.sh", machine.root / "launch")
    script(machine.root / ".venv" / "bin" / "cp-ring", 'printf "%s\\n" "$PWD" "$@"')
    with (machine.root / "launch" / "env.sh").open("a") as file:
        file.write("prepare_environment() { :; }\n")
    done = machine(f"cd /; bash {machine.root}/launch/quickstart.sh --verbose")
    folder, train, _, again, command, *rest = done.stdout.splitlines()
    assert (folder, train, again, rest) == (str(machine.root), "train", "--again", ["--verbose"])
    assert machine(f"cd /; {command}").stdout == done.stdout.replace("--verbose\n", "")


def test_test_extra_is_added_once_for_both(installer):
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
    scripts = [str(path) for path in sorted(LAUNCH.glob("*.sh"))] + [
        str(LAUNCH.parent / ".ci" / "run")
    ]
    done = subprocess.run(
        ["shellcheck", "-x", *scripts],
        cwd=LAUNCH.parent,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout


def test_another_megatron_is_installed_once_and_anew_where_it_was_interrupted(installer):
    installer('prepare_environment ""')
    place = installer.root / ".compat" / "0.18.2"
    (installer.root / "fail").touch()
    assert installer("prepare_compat 0.18.2").returncode != 0 and not place.exists()
    (installer.root / "fail").unlink()
    for _ in range(2):
        assert installer("prepare_compat 0.18.2").returncode == 0
        assert [folder.name for folder in place.parent.iterdir()] == ["0.18.2"]
    assert installer.calls() == ["venv", "pip", "pip", "pip"]


PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "shellcheck", "ip")


def system(machine, root=True, apt="exit 0"):
    """The run of prepare_system on a machine with an apt-get that writes its calls down, and those
    calls.
    """
    log = machine.root / "apt-calls"
    script(machine.tools / "id", f"echo {0 if root else 1000}")
    if apt:
        script(machine.tools / "apt-get", f'echo "$*" >> "{log}"; {apt}')
    done = machine("prepare_system; echo went on")
    assert done.returncode == 0 and done.stdout.endswith("went on\n")
    return done, log.read_text().splitlines() if log.exists() else []


def test_what_tests_need_is_installed_once(machine):
    done, calls = system(machine)
    assert (
        calls[0] == "-qq update"
        and "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge" in calls[1]
    )
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
    assert (
        done.stderr == "cp_ring: not installed, so that the tests that need them are skipped: ip\n"
    )
    assert bool(calls) == (how.get("apt") == "exit 100")


@pytest.mark.parametrize(
    ("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
def test_a_missing_program_skips_a_test_and_fails_it_in_ci(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    needs.programs("bash")
    with pytest.raises(outcome, match=r"not installed: no-such-program"):
        needs.programs("bash", "no-such-program")


def test_constraints_name_no_host_or_path():
    for line in (LAUNCH / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or (
            line.count("==") == 1 and "/" not in line and "@" not in line
        ), line


def test_another_torch_is_installed_once_over_the_environment(machine):
    """The lane's Python is that of .venv; pip is told to install into the lane, and what an
    interruption left is made anew.
    """
    (machine.tools / "python3.12").symlink_to(sys.executable)
    calls, fail = machine.root / "calls", machine.root / "fail"
    venv = machine.root / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = next(venv.glob("lib/python*/site-packages")) / "pip"
    pip.mkdir()
    (pip / "__main__.py").write_text(
        f"import pathlib, sys\nopen({str(calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"sys.exit(pathlib.Path({str(fail)!r}).exists())\n"
    )
    place = machine.root / ".compat" / "torch-2.15.0"
    fail.touch()
    assert machine("prepare_torch 2.15.0").returncode != 0 and not place.exists()
    fail.unlink()
    for _ in range(2):
        done = machine("prepare_torch 2.15.0")
        assert done.returncode == 0, done.stderr
    said = calls.read_text().splitlines()
    assert len(said) == 2 and said[1].endswith(" torch==2.15.0") and str(place.parent) in said[1]
    (pip.parent / "only_below.py").touch()
    assert subprocess.run([place / "bin" / "python", "-c", "import only_below"]).returncode == 0


@pytest.fixture
def checks(machine):
    """launch/test.sh in a checkout whose programs only write down how they were called; one named
    in FAIL fails.
    """
    shutil.copy(LAUNCH / "test.sh", machine.root / "launch" / "test.sh")
    script(machine.tools / "id", "echo 1000")
    for tool in ("ln", "ls"):
        (machine.tools / tool).symlink_to(shutil.which(tool))
    tell = (
        f'call="${{0##*/}} $*"; echo "$call" >> "{machine.root}/calls"; [[ "$call" != '
        f'*"${{FAIL:-nothing}}"* ]]'
    )
    for program in ("python", "ruff", "mypy", "lint-imports"):
        script(machine.root / ".venv" / "bin" / program, tell)
    script(machine.root / ".compat" / "torch-2.15.0" / "bin" / "python", tell)
    (machine.root / ".compat" / "0.18.2").mkdir()
    (machine.root / "mkdocs.yml").touch()

    def run(options="", fail=""):
        ready = 'touch "$VENV/complete-$(environment_hash)[test]"'
        done = machine(f"{ready}; FAIL={fail} {shutil.which('bash')} launch/test.sh {options}")
        calls = (machine.root / "calls").read_text().splitlines()
        (machine.root / "calls").unlink()
        return done, calls

    return run


def test_quick_checks_come_first_and_each_tells_its_time(checks):
    done, calls = checks("-m slow -k layout")
    assert done.returncode == 0, done.stderr
    words = [call.split() for call in calls]
    assert [word[0] for word in words[:4]] == ["ruff", "python", "mypy", "lint-imports"]
    assert words[1][1:] == ["launch/budget.py"]
    assert words[4][:4] == ["python", "-m", "mkdocs", "build"] and "--strict" in words[4]
    assert words[5][:3] == ["python", "-m", "pytest"] and words[5][-4:] == [
        "-m",
        "slow",
        "-k",
        "layout",
    ]
    assert "--durations=15" in words[5] and "loadgroup" in words[5]
    times = [
        line.split("cp_ring: ")[1].split("  ")[0]
        for line in done.stdout.splitlines()
        if line.endswith(" s")
    ]
    assert times == [
        "ruff",
        "budget",
        "mypy",
        "import-linter",
        "documentation",
        "tests",
        "all, without installation",
    ]
    assert len(re.findall(r" {2,}\d+ s +\d+ CPU s$", done.stdout, re.MULTILINE)) == len(times)


@pytest.mark.ci
def test_cpu_seconds_are_those_of_all_commands_that_have_ended(machine):
    work = f"{sys.executable} -c 'import time; exec(\"while time.process_time() < 2.2: pass\")'"
    done = machine(
        f'cpu_seconds; echo "$cpu"; {work}; cpu_seconds; echo "$cpu"; ({work}); cpu_seconds; echo '
        f'"$cpu"'
    )
    first, second, third = map(int, done.stdout.split())
    assert second - first >= 2 and third - second >= 2, done.stdout


@pytest.mark.parametrize(("fail", "stages"), [("mypy", 3), ("mkdocs", 5), ("loadgroup", 6)])
def test_a_failure_ends_the_run(checks, fail, stages):
    done, calls = checks(fail=fail)
    assert done.returncode != 0 and len(calls) == stages
    assert done.stdout.count("FAILED") == 1


def test_lanes_run_their_own_tests_only(checks):
    done, (call,) = checks("--torch 2.15.0 -x")
    assert done.returncode == 0, done.stderr
    assert "tests/test_attention.py" in call and call.endswith(" -x")
    done, (call,) = checks("--compat 0.18.2")
    assert done.returncode == 0, done.stderr
    names = ("core", "program", "recurrent", "versions", "moe_overlap")
    files = [f"tests/megatron/test_{name}.py" for name in names]
    files.append("tests/patches/test_patches.py")
    assert call == f"python -m pytest -m compat {' '.join(files)}"
