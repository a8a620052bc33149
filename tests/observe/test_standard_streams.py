"""A rank whose output goes to a full disk goes on, and ends with the exit code that it would have
had.
"""

import subprocess
import sys

from cp_ring.testing.rank_pool import LIMIT_S

PROGRAM = """
import sys
from cp_ring.observe import standard_streams
standard_streams.tolerate()
standard_streams.tolerate()
for number in range(10_000):
    print("a line of a rank", number, flush=number % 100 == 0)
sys.stdout.writelines(["a", "b"])
assert sys.stdout.fileno() == 1 and sys.stdout.encoding
{end}
"""


def run(out, err, end=""):
    with open(out, "w") as output, open(err, "w") as error:
        program = [sys.executable, "-c", PROGRAM.format(end=end)]
        return subprocess.run(program, stdout=output, stderr=error, timeout=LIMIT_S).returncode


def test_a_full_disk_changes_no_exit_code(tmp_path):
    assert run("/dev/full", tmp_path / "err") == 0
    (line,) = (tmp_path / "err").read_text().splitlines()
    assert (
        line == "cp_ring: standard output cannot be written; the job goes on: [Errno 28] No space "
        "left on device"
    )
    assert run("/dev/full", "/dev/full") == 0
    assert run("/dev/full", "/dev/full", "sys.exit(2)") == 2
    assert run(tmp_path / "out", tmp_path / "err") == 0
    assert (
        len((tmp_path / "out").read_text().splitlines()) == 10_001
        and not (tmp_path / "err").read_text()
    )
