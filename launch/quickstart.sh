#!/usr/bin/env bash
# Makes the environment and trains the small GPT of configs/quickstart.yaml; run again, it resumes.
# Options go to `cp-ring train`, for example: bash launch/quickstart.sh --set megatron.context_parallel_size=4
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh
prepare_environment "[megatron,tools,corpus,draw]"
exec "$VENV/bin/cp-ring" train configs/quickstart.yaml "$@"
