#!/usr/bin/env bash
# Makes the environment and runs every check: ruff, mypy, import-linter, then the tests. Options go to pytest.
# `test.sh --compat [VERSION...]` runs the tests marked compat with other versions of megatron-core instead (default: all of them).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh
prepare_environment "[test]"
if [[ "${1:-}" == --compat ]]; then
    shift
    (($#)) || set -- 0.16.1 0.17.1 0.18.2 0.19.2 # the last of each minor version that cp_ring serves
    for version in "$@"; do
        prepare_compat "$version"
        tests=(tests/megatron/test_core.py)
        # The wheel of 0.16 is without megatron.training: only what concerns megatron.core can be tried.
        [[ "$version" == 0.16.* ]] || tests+=(tests/megatron/test_versions.py)
        echo "cp_ring: tests with megatron-core $version"
        PYTHONPATH="$ROOT/.compat/$version" "$VENV/bin/python" -m pytest -m compat "${tests[@]}"
    done
    exit
fi
prepare_system
"$VENV/bin/ruff" check .
tree="$(package_tree)"
(cd "$tree" && "$VENV/bin/mypy" && PYTHONPATH="$tree" "$VENV/bin/lint-imports" --no-logo)
exec "$VENV/bin/python" -m pytest "$@"
