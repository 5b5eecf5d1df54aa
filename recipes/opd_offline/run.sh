#!/usr/bin/env bash
# Trains on the episodes of a finished run: run.sh RUN_DIR [overrides].
set -euo pipefail
corpus=$(realpath "${1:?usage: run.sh RUN_DIR [overrides]}")
shift
cd "$(dirname "$0")/../.."
[ -x .venv/bin/python ] && PATH="$PWD/.venv/bin:$PATH"
exec python -m verl.trainer.main_ppo +recipe=opd_offline "corpus=$corpus" "$@"
