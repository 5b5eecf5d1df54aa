"""verl's registry knows the reward manager, and it gives what the agent loop has graded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import verl  # noqa: F401
from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

from verl_opsd.errors import OpsdError


class Rows:
    """As much of verl's DataProto as a reward manager reads."""

    def __init__(self, extra: list[dict]):
        self.non_tensor_batch = {"tool_extra_fields": np.array(extra, dtype=object)}

    def __getitem__(self, where: slice) -> SimpleNamespace:
        return SimpleNamespace(non_tensor_batch={k: v[where] for k, v in self.non_tensor_batch.items()})


def manager(compute_score: object = None) -> object:
    return get_reward_manager_cls("opsd_pair")(OmegaConf.create({}), None, compute_score)


def test_reward_of_the_last_row() -> None:
    rows = Rows([{"reward_extra_info": {"reward": 0.0}}, {"reward_extra_info": {"reward": 0.5, "features_passed": 1}}])
    found = asyncio.run(manager().run_single(rows))
    assert found == {"reward_score": 0.5, "reward_extra_info": {"reward": 0.5, "features_passed": 1}}


def test_rows_of_another_agent_loop_and_other_reward_functions_are_refused() -> None:
    with pytest.raises(OpsdError, match="default_agent_loop=opsd_pair"):
        asyncio.run(manager().run_single(Rows([{}])))
    with pytest.raises(OpsdError, match="custom reward function"):
        manager(lambda **_: 1.0)
