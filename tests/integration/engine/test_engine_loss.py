"""Loss and gradient of the engine against eager full logits on the unsharded model, with every term, and under sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest

BOTH = (
    "parity_lora_untied",
    "parity_full_tied",
    "parity_device_lora",
    "cuts",
    "anchor",
    "anchor_full",
    "kept",
    "sampled",
    "task_reward",
    "views",
    "masked",
    "one_against_two",
)
CASES = {
    1: (*BOTH, "parity_lora_tied", "parity_full_untied", "parity_device_full", "resumed_reference"),
    2: (*BOTH, "composed"),
}
#: Largest relative error of one tensor's gradient, by its norm, against full logits in float32.
GRADIENT = 1e-5
each_world = pytest.mark.parametrize("world", [1, 2])


PARITY = [(w, c) for w in CASES for c in CASES[w] if c.startswith("parity")]


@pytest.mark.parametrize(("world", "case"), PARITY)
def test_parity(measured: Any, world: int, case: str) -> None:
    layouts = {k: v for k, v in measured(world, case).items() if k != "seconds"}
    assert len(layouts) >= (3 if "device" in case else 7)
    for name, found in layouts.items():
        assert found["missing"] == [], name
        assert found["mean"] > 0.1, name  # there is something to measure
        assert found["loss"] < 1e-5 and found["divergence"] < 1e-5, (name, found)
        assert found["grad"] < GRADIENT, (name, found)


@pytest.mark.parametrize("setting", ["union_packed", "union_padded", "teacher", "full", "signal"])
def test_supports_weights_reductions_and_anchor_are_their_definitions_together(measured: Any, setting: str) -> None:
    """Padded rows have every support too, a given one (``signal``) as well; the ranks hold one row with loss positions and three."""
    found = measured(2, "composed")[setting]
    assert found["missing"] == [] and found["mean"] > 1e-2
    assert found["loss"] < 1e-5 and found["divergence"] < 1e-5 and found["drift"] < 1e-5 and found["grad"] < GRADIENT, found
    assert found["weights"][1] - found["weights"][0] > 0.2  # the weights do something


CUTS = ("micro1", "micro2", "micro4", "micro8", "dynamic")


@each_world
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_of_eight_rows_is_one_step(measured: Any, world: int, cut: str) -> None:
    found = measured(world, "cuts")
    if world == 2 and cut == "micro8":  # four rows a rank
        assert cut not in found
        return
    assert found[cut]["missing"] == [] and found[cut]["loss"] < 1e-5 and found[cut]["divergence"] < 1e-5
    assert found[cut]["grad"] < GRADIENT and found[cut]["mean"] > 0.1


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_of_eight_shared_rows_is_one_step(measured: Any, cut: str) -> None:
    """Sequence parallel 2: both ranks hold all eight rows."""
    found = measured(2, "sequence_parallel")["cuts"][cut]
    assert found["missing"] == [] and found["loss"] < 1e-5 and found["divergence"] < 1e-5 and found["grad"] < GRADIENT


@each_world
def test_anchor_is_part_of_the_loss(measured: Any, world: int) -> None:
    found = measured(world, "anchor")
    assert found["loss"] < 1e-5 and found["grad"] < GRADIENT and found["missing"] == []
    assert "would vanish silently" in found["refused"]


@each_world
@pytest.mark.parametrize("model", ["untied", "tied"])
def test_anchor_of_full_parameter_training_is_the_initial_model(measured: Any, world: int, model: str) -> None:
    found = measured(world, "anchor_full")[model]
    assert found["drift"] > 1e-2
    assert found["loss"] < 1e-5 and found["grad"] < GRADIENT and found["missing"] == []


def test_reference_after_a_resume_is_the_model_before_any_training(measured: Any) -> None:
    found = measured(1, "resumed_reference")
    assert found["moved"] > 1e-2 and found["loaded"] < 1e-6  # training changed the weights, and they were loaded
    assert found["reference"] < 1e-6
    assert "weights have moved" in found["late"]


@each_world
def test_drift_is_measured_without_being_part_of_the_loss(measured: Any, world: int) -> None:
    found = measured(world, "anchor")
    assert found["drift_loss"] < 1e-6 and found["drift_grad"] < 1e-5
    assert found["drift"] < 1e-5 < 1e-2 < found["drift_mean"]


def test_one_rank_equals_two(measured: Any) -> None:
    one, two = (measured(w, "one_against_two")["losses"] for w in (1, 2))
    assert one[0] != one[1] != one[2]
    assert one == pytest.approx(two, abs=1e-5)


@each_world
def test_sampled_estimators_are_their_formulas(measured: Any, world: int) -> None:
    found = measured(world, "sampled")
    for name in ("k1", "k2", "k3", "policy_gradient"):
        assert found[name]["grad"] < GRADIENT and found[name]["missing"] == [], name
        scale = max(1.0, abs(found[name]["loss_value"]))
        assert found[name]["loss"] < 1e-5 * scale and found[name]["divergence"] < 1e-4, name
        assert found[name]["drift_unknown"] == 0 and found[name]["drift"] > 1e-2, (
            name
        )  # measured where it is no part of the loss
        assert found[name]["identity"] <= 1e-5 < 1e-2 < found[name]["shifted"], name
    assert 0.1 < found["policy_gradient"]["masked"] < 0.9  # some tokens are trusted, some not


@each_world
def test_task_reward_is_part_of_the_loss(measured: Any, world: int) -> None:
    found = measured(world, "task_reward")
    assert abs(found["term"]) > 1e-2 and found["moved"] > 1e-2
    for name in ("micro1", "micro2", "dynamic"):
        assert found[name]["loss"] < 1e-5 and found[name]["grad"] < GRADIENT and found[name]["missing"] == [], name
    assert "would vanish silently" in found["refused"]


@each_world
def test_mean_over_kept_positions_is_divided_once_a_step(measured: Any, world: int) -> None:
    found = measured(world, "kept")
    for name in ("micro1", "micro2", "dynamic"):
        assert found[name]["loss"] < 1e-5 and found[name]["grad"] < GRADIENT and found[name]["missing"] == [], name
        assert found[name]["kept"] == pytest.approx(1, abs=1e-5), name  # a mean's weights
        assert found[name]["reported"] == pytest.approx(found[name]["loss_value"], abs=1e-5), name
    assert len(found["nothing"]) == world and all("no position" in m for m in found["nothing"])


@each_world
def test_one_pass_a_turn_equals_one_pass_a_branch(measured: Any, world: int) -> None:
    found = measured(world, "views")
    assert found["passes"] >= 2
    assert max(found["kl"], found["briefed_kl"]) < 1e-5
    assert max(found["grad"], found["briefed_grad"]) < GRADIENT


@each_world
def test_teacher_that_changes_changes_the_gradient(measured: Any, world: int) -> None:
    found = measured(world, "views")
    assert found["brief_matters"] > 0.1
    assert found["changed"] > 0.1


@each_world
def test_masked_positions_have_no_gradient(measured: Any, world: int) -> None:
    found = measured(world, "masked")
    assert found["nonzero"] == 0 and found["loss"] == 0 and found["tensors"] == 42
    assert found["one"] > 0


# ---- sequence parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["micro1", "micro2", "dynamic"])
@pytest.mark.parametrize("model", ["untied-True", "tied-False"])
def test_two_ranks_that_share_every_sequence_give_the_eager_loss(measured: Any, model: str, setting: str) -> None:
    found = measured(2, "sequence_parallel")[f"{model}-{setting}"]
    assert found["missing"] == [] and found["mean"] > 0.1
    assert found["loss"] < 1e-5 and found["divergence"] < 1e-5 and found["grad"] < GRADIENT


@pytest.mark.parametrize("term", ["kept", "reward"])
def test_every_term_of_the_loss_is_right_under_sequence_parallelism(measured: Any, term: str) -> None:
    """The whole gradient, tensor by tensor, against full logits of the unsharded model."""
    found = measured(2, "sequence_parallel")[term]
    assert found["missing"] == [] and found["loss"] < 1e-5 and found["grad"] < GRADIENT


def test_gated_linear_attention_is_right_under_sequence_parallelism(measured: Any) -> None:
    """Two packed rows a forward: the state and its gradient cross the ranks' slices, and not the rows."""
    found = measured(2, "sequence_parallel")["hybrid"]
    assert found["missing"] == [] and found["mean"] > 0.1
    assert found["loss"] < 1e-5 and found["divergence"] < 1e-5 and found["grad"] < GRADIENT, found


def test_identity_control_is_zero_under_sequence_parallelism(measured: Any) -> None:
    found = measured(2, "sequence_parallel")
    assert found["identity"]["max"] <= 1e-6 and found["shifted"]["mean"] > 1e-2


def test_the_sequence_parallel_check_sees_an_attention_that_is_blind(measured: Any) -> None:
    found = measured(2, "sequence_parallel")
    assert found["checks"]["sequence_parallel"] <= 1e-4  # of log-probabilities in float32
    assert found["blind"]["fatal"] and not found["blind"]["passed"] and found["blind"]["value"] > 1e-2


def test_sequence_parallel_ranks_split_the_loss_positions(measured: Any) -> None:
    found = measured(2, "sequence_parallel")
    assert sum(found["split"]["each"]) == found["split"]["all"] and min(found["split"]["each"]) > 0
    assert found["checks"]["layout"] < 1e-4


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_ranks_may_share_every_sequence(measured: Any, world: int) -> None:
    """Plain and hybrid (gated linear attention) layers."""
    found = measured(world, "shared_sequences")
    for model in ("untied", "hybrid"):
        for micro in (1, 2):
            step = found[f"{model}-{micro}"]
            assert step["missing"] == [] and step["mean"] > 0.1
            assert step["loss"] < 1e-5 and step["divergence"] < 1e-5 and step["grad"] < GRADIENT, (model, micro, step)
        assert found[f"{model}-check"] <= 1e-4
        assert found[f"{model}-bf16"]["loss"] < 1e-3 < found[f"{model}-bf16"]["value"], found[f"{model}-bf16"]
    assert found["blind"]["stops"] and found["blind"]["value"] > 1e-2  # a state that starts anew at each slice
