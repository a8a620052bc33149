#!/usr/bin/env bash
# Everything that needs a GPU, on one GPU, step by step; results go to ${OUT:-.}/results.jsonl, output to results.log beside it.
#   tests/gpu/run.sh [--only a b c] [--seconds 560] [--device fake]
# Each step is a process with a time limit of its own, so a step that fails, crashes or hangs loses only itself. The exit code is 0
# only if every check holds. --seconds starts no step after that time; --device fake runs small shapes on a fake GPU
# (tests/fakegpu), as far as no value of the device is read.
# Wheels in .whl/ (see tests/gpu/wheels.sh) are installed beside the environment, without a network.
set -euo pipefail
OUT=$(realpath "${OUT:-.}")
export OUT
device=cuda seconds=3600 only=(values streams tiles empties merges a b c replays d e f g h) nccl=
# seconds of a step on a GPU; on a fake one nothing is measured, and the limit is only against hanging
declare -A limits=([facts]=60 [a]=300 [b]=150 [c]=90 [d]=120 [e]=120 [f]=150 [g]=600 [h]=600
    [values]=90 [streams]=90 [tiles]=120 [empties]=60 [merges]=60 [replays]=150)
while (($#)); do
    case $1 in
    --device) device=$2 && shift 2 ;;
    --seconds) seconds=$2 && shift 2 ;;
    --only)
        only=() && shift
        while (($#)) && [[ $1 != --* ]]; do only+=("$1") && shift; done
        ;;
    *) echo "run.sh: $1 is unknown" >&2 && exit 2 ;;
    esac
done
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
# The package and its tests; cp_ring itself need not be installed.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
ln -s "$PWD"/{cp_ring,tests} "$tree/"
paths=$tree
if [[ $device == fake ]]; then
    # The libraries of tests/fakegpu stand for those of a GPU, with TransformerEngine where it was built.
    libraries=$(PYTHONPATH=$tree "$python" -m tests.fakegpu.process)
    eval "$libraries"
    paths=$paths${FAKEGPU_SITE:+:$FAKEGPU_SITE}
elif compgen -G '.whl/*.whl' >/dev/null; then
    site=$tree/site
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl
    paths=$site:$paths
    if [[ -f .whl/libnccl.so.2.xz ]]; then
        xz -dc .whl/libnccl.so.2.xz >"$site/libnccl.so.2"
        nccl=$site/libnccl.so.2
    fi
fi
export PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH}
# cuBLAS is deterministic only with this, TransformerEngine shall take cuDNN, and gloo talks over loopback.
export CUBLAS_WORKSPACE_CONFIG=:4096:8 NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=1 GLOO_SOCKET_IFNAME=lo
cd "$tree"

# run_step NAME: appends how it ended to the results; fails unless it passed.
run_step() {
    local limit=${limits[$1]:?run.sh: no such step} left=$((seconds - SECONDS)) code=0 state pid
    [[ $device == cuda ]] || limit=1800
    ((limit < left)) || limit=$left
    if ((limit < 5)); then
        state="not started: no time left" code=2
    else
        timeout --signal KILL "$limit" "$python" -m tests.gpu.step "$1" "$device" "$OUT/results.jsonl" "$limit" "$nccl" \
            >>"$OUT/results.log" 2>&1 &
        pid=$!
        wait "$pid" || code=$?
        kill -KILL -- "-$pid" 2>/dev/null || true # also the processes that it started, which are in timeout's group
        case $code in
        0) state=passed ;;
        1) state=failed ;;
        137) state="timed out" ;;
        *) state=crashed ;;
        esac
    fi
    printf '{"step": "%s", "state": "%s", "holds": %s}\n' "$1" "$state" "$( ((code)) && echo false || echo true)" >>"$OUT/results.jsonl"
    echo "step $1: $state"
    return "$code"
}

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "no CUDA device; --device fake runs the steps on a fake one")'
failed=0
for step in facts "${only[@]}"; do run_step "$step" || failed=1; done
exit "$failed"
