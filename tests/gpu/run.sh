#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under 8 minutes on one H200; writes one JSON file.
#   tests/gpu/run.sh [OUT.json] [arguments of tests/gpu/run.py, such as --device cpu or --only kernels]
# Wheels in .whl/ (TransformerEngine, flash-attn, pydantic, ...) are installed beside the environment, without a network.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=results.json
if [[ $# -gt 0 && $1 != -* ]]; then
    out=$1
    shift
fi
python=${PYTHON:-python3}
paths=$PWD
if compgen -G '.whl/*.whl' >/dev/null; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl
    paths=$site:$paths
fi
export PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH}
# cuBLAS is deterministic only with this, TransformerEngine shall take cuDNN, and gloo talks over loopback.
export CUBLAS_WORKSPACE_CONFIG=:4096:8 NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=1 GLOO_SOCKET_IFNAME=lo
exec "$python" -m tests.gpu.run --out "$out" "$@"
