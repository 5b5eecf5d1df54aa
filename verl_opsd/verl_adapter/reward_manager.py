"""verl's reward manager ``opsd_pair``: what the hidden tests gave, for any of verl's trainers with the agent loop ``opsd_pair``.

The agent loop grades an episode before it returns rows, so each row carries its reward; this manager hands it to verl's reward path
(``reward.reward_manager.name=opsd_pair``), for plain reinforcement learning such as GRPO on the same environment.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.registry import register

from verl_opsd.errors import OpsdError


@register("opsd_pair")
class OpsdRewardManager(RewardManagerBase):
    """Reads ``reward_extra_info`` of a row; every row of one episode has the same."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: Any = None,
        reward_model_tokenizer: Any = None,
    ):
        if compute_score is not None:
            raise OpsdError(
                "a custom reward function beside reward.reward_manager.name=opsd_pair",
                "episodes are rewarded by their hidden tests; another function would be ignored",
                "leave reward.custom_reward_function out; shaped terms are opsd.reward",
            )
        super().__init__(config, tokenizer, compute_score)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """The reward of the last row of ``data``.

        Raises:
            OpsdError: the row was not graded.
        """
        extra = data[-1:].non_tensor_batch.get("tool_extra_fields", [{}])[0]
        info = dict(extra.get("reward_extra_info", {}))
        if "reward" not in info:
            raise OpsdError(
                "a row without a reward",
                "rows come from the agent loop opsd_pair, which grades an episode before it returns them",
                "set actor_rollout_ref.rollout.agent.default_agent_loop=opsd_pair",
            )
        return {"reward_score": info["reward"], "reward_extra_info": info}
