"""Which layers of the engine's model keep their activations: the gradient does not depend on it, the saved bytes do."""

from __future__ import annotations

from typing import Any

import pytest

CASES = {1: ("activations",), 2: ("activations",)}
each_world = pytest.mark.parametrize("world", [1, 2])


@each_world
@pytest.mark.parametrize("model", ["hybrid", "untied"])
def test_the_gradient_is_the_same_whatever_is_kept(measured: Any, world: int, model: str) -> None:
    """Bit for bit: a second forward gives the numbers of the first one."""
    found = measured(world, "activations")[model]
    settings = [k for k in found if k not in ("kept", "layers")]
    assert set(settings) == {"verl", "none", "full", "none_host", "full_host"} | ({"linear"} if model == "hybrid" else set())
    for name in settings:
        assert found[name]["scale"] > 1e-2 and (found[name]["grad"], found[name]["loss"]) == (0.0, 0.0), name


@pytest.mark.parametrize("model", ["hybrid", "untied"])
def test_saved_bytes_are_those_of_the_layers_that_are_kept(measured: Any, model: str) -> None:
    found = measured(1, "activations")[model]
    bytes_ = {k: v["bytes"] for k, v in found.items() if k != "layers"}
    tokens = 91  # of the four rows, in float32 vectors of 48
    one_input = tokens * 48 * 4
    assert found["none"]["host"] == 0 and found["none_host"]["host"] == found["layers"] * one_input
    assert bytes_["none"] - bytes_["none_host"] == found["layers"] * one_input
    assert bytes_["verl"] == bytes_["none"] < bytes_["kept"]
    if model == "untied":  # every layer is of full attention
        assert bytes_["full"] == bytes_["full_host"] == bytes_["kept"] and found["full_host"]["host"] == 0
        return
    # each kind's layers keep what they keep beside an input each, whichever others are checkpointed: three of one, one of the other
    linear, full = (bytes_[k] - bytes_["none"] for k in ("linear", "full"))
    assert linear > full > 0
    assert linear + full == pytest.approx(bytes_["kept"] - bytes_["none"], rel=1e-2)
    assert bytes_["full"] - bytes_["full_host"] == found["full_host"]["host"] == 3 * one_input


@each_world
def test_activation_plans_that_contradict_are_refused(measured: Any, world: int) -> None:
    found = measured(world, "activations")
    assert "enable_gradient_checkpointing=False" in found["hybrid_refused"]
    assert "7 layers for a model of 3" in found["number"]
