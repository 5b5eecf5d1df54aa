#!/usr/bin/env bash
# Online on-policy distillation; arguments are overrides, e.g. scale=smollm loss=anchored.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x .venv/bin/python ] && PATH="$PWD/.venv/bin:$PATH"
exec python -m verl.trainer.main_ppo +recipe=opd "$@"
