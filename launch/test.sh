#!/usr/bin/env bash
# Makes the environment and runs every check: ruff, mypy, import-linter, then the tests. Options go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh
prepare_environment "[test]"
prepare_system
"$VENV/bin/ruff" check .
"$VENV/bin/mypy"
"$VENV/bin/lint-imports"
exec "$VENV/bin/python" -m pytest "$@"
