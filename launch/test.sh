#!/usr/bin/env bash
# Makes the environment and runs every check, the quickest first: ruff, mypy, import-linter, the documentation, the tests.
# The tests run in parallel worker processes (`-n 0`: in one process). Options go to pytest.
#
#   test.sh [OPTION...]                  for example: test.sh -m slow; test.sh -x -k layout; test.sh -m "not slow" (as .ci/run)
#   test.sh --compat [VERSION...]        only the tests marked compat, with other versions of megatron-core (default: all)
#   test.sh --checkout PATH...           the same with checkouts of Megatron-LM: their own scripts, also those that cannot run, and the certificate
#   test.sh --fake-gpu [full] [OPTION...]  only the tests on a fake GPU, those marked ci too; full: also with the real TransformerEngine
#   test.sh --bridge                     recipes of Megatron Bridge, of its newest release in .compat/
#   test.sh --torch VERSION [OPTION...]  only the tests that depend on torch, with another version of it
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes, and each would compile the package again

PARALLEL=(-n auto --dist loadgroup --no-loadscope-reorder --durations=15)
COMPAT=(0.18.2 0.19.2) # the last of each minor version that cp_ring supports
TORCH_TESTS=(tests/test_attention.py tests/test_attention_masks.py tests/kernels tests/ops tests/comm tests/plan
    tests/megatron/test_documents.py tests/megatron/test_recompute.py tests/megatron/test_run.py tests/megatron/test_specs.py)

times=()
installed=0 # CPU seconds until the first stage

# line NAME SECONDS CPU_SECONDS: of a stage, or of all.
line() { printf '%-28s %4d s %5d CPU s' "$@"; }

# stage NAME COMMAND...: runs the command and records its wall time and CPU time. If the command fails, the script ends.
stage() {
    local name="$1" start=$SECONDS code=0 before
    shift
    echo "cp_ring: $name"
    cpu_seconds
    before=$cpu
    "$@" || code=$?
    cpu_seconds
    times+=("$(line "$name" $((SECONDS - start)) $((cpu - before)))")
    if ((code)); then
        times[-1]+="  FAILED"
        exit "$code"
    fi
}

summary() {
    ((${#times[@]})) || return 0
    cpu_seconds
    printf 'cp_ring: %s\n' "${times[@]}" "$(line "all, without installation" $((SECONDS - started)) $((cpu - installed)))"
}
trap summary EXIT

# compat FOLDER: with the megatron of FOLDER.
compat() {
    PYTHONPATH="$1" "$VENV/bin/python" -m pytest -m compat tests/megatron/test_program.py tests/megatron/test_versions.py \
        tests/megatron/test_moe_overlap.py tests/megatron/test_dynamic_groups.py tests/patches/test_patches.py
}

# helpers CHECKOUT: builds those of its data sets with the pybind11 of torch, as Megatron does at its start with one that is installed.
helpers() {
    CPATH="$("$VENV/bin/python" -c 'import sysconfig, torch; print(torch.__path__[0] + "/include", sysconfig.get_path("include"), sep=":")')"
    MAKEFLAGS="CPPFLAGS= LIBEXT=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
    export CPATH MAKEFLAGS
    make --quiet -C "$1/megatron/core/datasets"
}

prepare_environment "[test]"
case "${1:-}" in
--compat)
    shift
    (($#)) || set -- "${COMPAT[@]}"
    for version in "$@"; do prepare_compat "$version"; done
    started=$SECONDS
    cpu_seconds
    installed=$cpu
    for version in "$@"; do stage "megatron-core $version" compat "$ROOT/.compat/$version"; done
    ;;
--checkout)
    : "${2:?give a checkout of Megatron-LM}"
    shift
    for path in "$@"; do helpers "$path"; done
    started=$SECONDS
    cpu_seconds
    installed=$cpu
    for path in "$@"; do
        stage "$path" compat "$(realpath "$path")"
        stage "$path: scripts" env PYTHONPATH="$(realpath "$path")" "$VENV/bin/python" -m pytest -m slow tests/megatron/test_user_scripts.py tests/megatron/test_rejections.py tests/megatron/test_entry_flags.py \
            -k "of_megatron_lm or of_checkouts" --megatron-lm "$path"
        stage "$path: certificate" "$VENV/bin/python" -m tests.certificate.checkouts "$path" --splits cp2 tp2cp2
    done
    ;;
--fake-gpu)
    shift
    marks="not slow"
    if [[ "${1:-}" == full ]]; then
        shift
        marks=""
    fi
    started=$SECONDS
    cpu_seconds
    installed=$cpu
    stage "fake GPU" "$VENV/bin/python" -m pytest --durations=15 -m "$marks" tests/fakegpu "$@"
    ;;
--bridge)
    prepare_bridge
    started=$SECONDS
    cpu_seconds
    installed=$cpu
    stage "Megatron Bridge" "$VENV/bin/python" -m pytest -m slow tests/programs
    ;;
--torch)
    version="${2:?give a version of torch, for example --torch 2.15.0}"
    shift 2
    prepare_torch "$version"
    started=$SECONDS
    cpu_seconds
    installed=$cpu
    stage "torch $version" "$ROOT/.compat/torch-$version/bin/python" -m pytest "${PARALLEL[@]}" -m "not slow" "${TORCH_TESTS[@]}" "$@"
    ;;
*)
    prepare_system
    started=$SECONDS
    cpu_seconds
    installed=$cpu
    stage ruff "$VENV/bin/ruff" check .
    stage budget "$VENV/bin/python" launch/budget.py
    stage mypy "$VENV/bin/mypy"
    stage import-linter "$VENV/bin/lint-imports" --no-logo
    [[ ! -e mkdocs.yml ]] || stage documentation "$VENV/bin/python" -m mkdocs build --quiet --strict --site-dir "$ROOT/.cache/site"
    stage tests "$VENV/bin/python" -m pytest "${PARALLEL[@]}" "$@"
    ;;
esac
