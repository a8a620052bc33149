"""What a test needs of the machine: where it is missing the test is skipped, or in CI (CI=true)
fails.
"""

import os
import shutil

import pytest


def programs(*names):
    """Skips the calling test (or fixture) where one of the programs `names` is not on PATH; in CI
    it fails instead.
    """
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        skip_or_fail(
            f"not installed: {', '.join(missing)} (as root, `bash launch/test.sh` installs them "
            "where there is apt-get)"
        )


def skip_or_fail(reason):
    """For what launch/test.sh installs: skips the calling test with `reason`, or fails it where the
    variable CI is set.
    """
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(reason)
    pytest.skip(reason)
