#!/usr/bin/env bash
# Collects the wheels that tests/gpu/run.sh installs on a machine without a network: Megatron and what it and cp_ring import.
#   tests/gpu/wheels.sh [OUT, by default .whl] [MORE ...]
# MORE are further files, or folders of them: wheels that were built elsewhere (TransformerEngine, flash-attn), libnccl.so.2.xz.
# For x86-64 with Python 3.12 by default; PYTHON_VERSION and PLATFORM choose another. There, torch, numpy and einops must be
# installed, and pytest, whose emulations the dry run uses.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-.whl}
python=${PYTHON:-python3}
mkdir -p "$out"
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" \
    --platform "${PLATFORM:-manylinux2014_x86_64}" --platform "${PLATFORM:-manylinux_2_28_x86_64}" --dest "$out" \
    megatron-core==0.19.2 packaging psutil PyYAML tqdm typing_extensions
# pydantic with its own dependencies: its core must be of the version that it names.
"$python" -m pip download -q --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" \
    --platform "${PLATFORM:-manylinux2014_x86_64}" --dest "$out" pydantic
for more in "${@:2}"; do
    if [[ -d $more ]]; then
        find "$more" -maxdepth 1 \( -name '*.whl' -o -name libnccl.so.2.xz \) -exec cp -t "$out" {} +
    else
        cp -t "$out" "$more"
    fi
done
for name in transformer_engine flash_attn; do
    compgen -G "$out/$name*.whl" >/dev/null || echo "wheels.sh: no wheel of $name in $out: its steps will say that it is missing" >&2
done
du -ch "$out"/* | tail -1
