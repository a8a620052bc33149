#!/usr/bin/env bash
# Everything that needs a GPU, on one GPU, step by step; results go to ${OUT:-.}/results.jsonl, output to results.log beside it.
#   tests/gpu/run.sh [arguments of tests/gpu/run.py, such as --only a b c, --seconds 560 or --device cpu]
# Wheels in .whl/ (see tests/gpu/wheels.sh) are installed beside the environment, without a network.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
paths=$PWD
more=()
if [[ " $* " != *" --device cpu "* ]] && compgen -G '.whl/*.whl' >/dev/null; then
    site=$(mktemp -d)
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
exec "$python" -m tests.gpu.run "$@" "${more[@]}"
