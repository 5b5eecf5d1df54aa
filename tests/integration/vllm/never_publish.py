"""A fault for the publish guard: from version NEVER_PUBLISH_FROM on, verl's vLLM adapter takes the trained weights and sends none.

Loaded in every process by verl's VERL_USE_EXTERNAL_MODULES.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from verl_opsd.plugin import after_import


def _break(module: ModuleType) -> None:
    from verl.workers.rollout.utils import ensure_async_iterator

    publish, first = module.ServerAdapter.update_weights, int(os.environ["NEVER_PUBLISH_FROM"])

    async def update_weights(self: Any, weights: Any, global_steps: int | None = None, **kwargs: Any) -> None:
        if global_steps is None or global_steps < first:
            await publish(self, weights, global_steps=global_steps, **kwargs)
            return
        async for _ in ensure_async_iterator(weights):
            pass
        if self._ensure_server_handle():
            await self.server_handle.set_global_steps.remote(global_steps)

    module.ServerAdapter.update_weights = update_weights


after_import("verl.workers.rollout.vllm_rollout.vllm_rollout", _break)
