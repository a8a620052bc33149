"""Each row of the table of what is supported names tests, and `.ci/run` runs each of them with the
default megatron-core.
"""

import re
import subprocess
import sys

import pytest

from tests.docs.test_snippets import ROOT
from tests.parity.test_matrix import HEADLINE

LANE = 'launch/test.sh -m "not slow"'


def rows(page):
    """What each row of the page's table promises, and the tests that its last cell names."""
    text = page.read_text().partition("## What is supported")[2].partition("\n## ")[0]
    lines = [line.strip(" |").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: re.findall(r"`([^`]+)`", cells[-1]) for cells in lines[1:]}


@pytest.mark.ci
def test_each_row_names_tests_that_ci_runs(request):
    assert LANE in (ROOT / ".ci" / "run").read_text()
    claims = rows(ROOT / "README.md")
    assert 5 < len(claims) <= 15
    files = sorted({name for names in claims.values() for name in names if name.endswith(".py")})
    collected = set()
    if request.config.option.markexpr == "not slow":  # as CI
        collected = {item.nodeid.partition("::")[0] for item in request.session.items}
    if paths := [path for name in files if (path := f"tests/{name}") not in collected]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow"]
        done = subprocess.run([*command, *paths], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        collected |= set(re.findall(r"^(tests/\S+?\.py)::", done.stdout, re.MULTILINE))
    for claim, names in claims.items():
        assert names, f"{claim}: no test"
        kinds = [name.removeprefix("parity ") for name in names if name.startswith("parity ")]
        unknown = {*names} - {f"parity {kind}" for kind in kinds}
        unknown = {name for name in unknown if f"tests/{name}" not in collected}
        assert not unknown, f"{claim}: CI runs nothing of {unknown}"
        assert {*kinds} <= {*HEADLINE}, f"{claim}: {kinds} are no kinds of parity cells"
