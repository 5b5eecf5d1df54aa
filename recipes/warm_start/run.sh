#!/usr/bin/env bash
# Trains on a corpus: run.sh CORPUS [overrides].
set -euo pipefail
corpus=$(realpath "${1:?usage: run.sh CORPUS [overrides]}")
shift
cd "$(dirname "$0")/../.."
[ -x .venv/bin/python ] && PATH="$PWD/.venv/bin:$PATH"
n=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$n" -gt 1 ]; then
  exec torchrun --nproc_per_node="$n" -m verl.trainer.sft_trainer +recipe=warm_start "corpus=$corpus" "$@"
fi
exec python -m verl.trainer.sft_trainer +recipe=warm_start "corpus=$corpus" "$@"
