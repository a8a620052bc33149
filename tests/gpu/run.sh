#!/usr/bin/env bash
# Everything that needs a GPU, on one GPU, step by step; results go to ${OUT:-.}/results.jsonl, output to results.log beside it.
#   tests/gpu/run.sh [--only a b c] [--seconds 560] [--device fake]
# Wheels in .whl/ (see tests/gpu/wheels.sh) are installed beside the environment, without a network.
set -euo pipefail
OUT=$(realpath "${OUT:-.}")
export OUT
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
# The package as it is installed, with patches, configs and launch in it; cp_ring itself need not be installed.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/cp_ring"
ln -s "$PWD"/cp_ring/* "$PWD"/{patches,configs,launch} "$tree/cp_ring/"
ln -s "$PWD/tests" "$tree/tests"
paths=$tree
more=()
if [[ " $* " == *" --device fake "* ]]; then
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
        more=(--nccl "$site/libnccl.so.2")
    fi
fi
export PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH}
# cuBLAS is deterministic only with this, TransformerEngine shall take cuDNN, and gloo talks over loopback.
export CUBLAS_WORKSPACE_CONFIG=:4096:8 NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=1 GLOO_SOCKET_IFNAME=lo
cd "$tree"
"$python" -m tests.gpu.run "$@" "${more[@]}"
