"""launch/env.sh where a machine has settings of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """set -euo pipefail
cd "$1"
source launch/env.sh
find_python >/dev/null
echo "$ROOT"
"$2" -m pip install --quiet --disable-pip-version-check --no-index pip
"""


@pytest.mark.parametrize(
    "given",
    [{"CDPATH": "."}, {"PIP_USER": "1"}, {"PIP_TARGET": "x", "PIP_PREFIX": "x"}],
    ids="-".join,
)
def test_settings_of_the_machine_change_nothing(given):
    """The root is one folder, a Python is found, and pip installs into the virtual environment."""
    words = ["bash", "-c", CODE, "env", str(ROOT), sys.executable]
    done = subprocess.run(words, env=os.environ | given, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()) == (0, [str(ROOT)]), done.stderr
