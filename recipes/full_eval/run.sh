#!/usr/bin/env bash
# Full-set evaluation; arguments are overrides, e.g. opsd.evaluation.seeds=3 actor_rollout_ref.model.path=MODEL.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x .venv/bin/python ] && PATH="$PWD/.venv/bin:$PATH"
exec python -m verl.trainer.main_ppo +recipe=full_eval "$@"
