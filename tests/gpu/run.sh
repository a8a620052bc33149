#!/usr/bin/env bash
# Checks everything that needs a GPU, on one GPU; on several, also TransformerEngine's own context parallelism beside cp_ring.
#   tests/gpu/run.sh [OPTIONS of pytest]      as -k conformance
# Wheels in .whl/ (see tests/gpu/wheels.sh) are installed beside the environment, without a network.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
# The package as it is installed, with patches, configs and launch in it; cp_ring itself need not be installed.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/cp_ring"
ln -s "$PWD"/cp_ring/* "$PWD"/{patches,configs,launch} "$tree/cp_ring/"
ln -s "$PWD"/{tests,pyproject.toml} "$tree/"
paths=$tree
if compgen -G '.whl/*.whl' >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$tree/site" .whl/*.whl
    paths=$tree/site:$paths
fi
export PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH}
# cuBLAS is deterministic only with this, TransformerEngine shall take cuDNN, and gloo talks over loopback.
export CUBLAS_WORKSPACE_CONFIG=:4096:8 NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=1 GLOO_SOCKET_IFNAME=lo
cd "$tree"
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
code=0
"$python" -m pytest -q -p no:cacheprovider tests/gpu "$@" || code=$?
((gpus < 2)) || "$python" -m torch.distributed.run --standalone --nproc-per-node="$gpus" -m tests.gpu.beside || code=$?
exit "$code"
