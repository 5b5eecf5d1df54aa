"""What the engine does beside the loss: device teachers, scoring, copies, controls, checks, refusals, dtypes, workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verl_opsd.verl_adapter.rehearsal import unmade

BOTH = (
    "device_control",
    "routed",
    "state",
    "uneven",
    "control",
    "checks",
    "rehearsal",
    "nonfinite",
    "worker",
    "remote",
    "export",
    "copies",
    "arms",
)
CASES = {
    1: (
        *BOTH,
        "device_anchor",
        "adapters_off",
        "grouping",
        "rope",
        "multimodal",
        "logprobs",
        "hybrid",
        "adapter_dtype",
        "bf16",
        "refusals",
        "own_path",
    ),
    2: BOTH,
}
#: Largest relative error of one tensor's gradient, by its norm, against full logits in float32.
GRADIENT = 1e-5
each_world = pytest.mark.parametrize("world", [1, 2])


# ---- a device teacher --------------------------------------------------------------------------------------------------


def test_anchor_beside_a_device_teacher_is_the_students_base(measured: Any) -> None:
    found = measured(1, "device_anchor")
    assert min(found["parts"]) > 1e-2
    assert found["loss"] < 1e-5 and found["grad"] < GRADIENT


@each_world
def test_identical_device_teacher_has_no_divergence(measured: Any, world: int) -> None:
    found = measured(world, "device_control")
    assert found["identity"]["mean"] <= 1e-6 and found["identity"]["max"] <= 1e-5
    assert abs(found["view"]) < 1e-5 < 1e-2 < found["view_mean"]
    assert found["self_identity"]["mean"] <= 1e-6 and found["self_shifted"]["mean"] > 1e-2
    assert found["grads"] == 0 and found["checks"]


@each_world
def test_control_arms(measured: Any, world: int) -> None:
    """The identity teacher leaves the student at its base, which a brief does not; the likelihood arm is plain code's, and scores nothing."""
    found = measured(world, "arms")
    assert found["identity"] <= 1e-9 < 1e-3 < found["briefed"]
    nll = found["nll"]
    assert nll["loss_value"] > 1e-2 and nll["loss"] < 1e-5 and nll["divergence"] < 1e-4 and nll["grad"] < 1e-3
    assert len(set(nll["forwards"])) == 1 and nll["identity"] <= 1e-9
    assert "has no teacher" in found["refused"]


@each_world
def test_rows_of_several_teachers_in_one_update(measured: Any, world: int) -> None:
    found = measured(world, "routed")
    assert found["loss_value"] > 1e-3 and found["loss"] < 1e-5 and found["divergence"] < 1e-4 and found["grad"] < 1e-3
    assert found["teachers"] == [0, 1]
    assert "rows that share a forward have the same one" in found["mixed"]


DEVICE_REFUSED = {
    "unset": "before the loss is set",
    "shifted": "use shift 0",
    "vocabulary": "same number of vocabulary rows",
    "own_name": "the student's own heads",
    "unscored": "before the update",
}


@each_world
@pytest.mark.parametrize("what", sorted(DEVICE_REFUSED))
def test_device_teacher_refusals(measured: Any, world: int, what: str) -> None:
    assert DEVICE_REFUSED[what] in measured(world, "device_control")[what]


# ---- scoring ------------------------------------------------------------------------------------------------------------


@each_world
@pytest.mark.parametrize("setting", ["lora", "lora_initial", "full", "full_no_reshard", "lora_ema", "full_lagged"])
def test_scoring_leaves_no_trace(measured: Any, world: int, setting: str) -> None:
    found = measured(world, "state")[setting]
    assert found["teacher_unmoved"] == 0  # the trained weights moved in between
    assert found["after"] and found["interrupted"] and found["after_error"]
    assert not found["training"]  # while it scores, although the student was in training mode
    first, second = found["norms"]  # scored just now, and from a kept signal
    assert first > 1e-3 and first == pytest.approx(second, rel=1e-5)
    assert (found["moved"] > 1e-2) == setting.startswith("lora")  # the next forward gathers the weights as they are by then


@each_world
@pytest.mark.parametrize("kind", ["frozen", "ema", "lagged"])
@pytest.mark.parametrize("trained", ["lora", "full"])
def test_teacher_of_earlier_weights(measured: Any, world: int, kind: str, trained: str) -> None:
    """Four rounds against eager code under weights that follow the definition, and a resume after the third."""
    found = measured(world, "copies")[f"{kind}-{trained}"]
    assert max(found["hidden"]) < 2e-4 and found["moved"][0] < 2e-4
    assert (found["moved"][-1] > 1e-2) == (kind != "frozen")
    assert found["student"] < 1e-6 and found["resumed"] < 1e-5
    assert found["identity"] < 1e-6 < 1e-3 < found["brief"]


@each_world
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("other_decay", "'decay': 0.7}, the run's teacher is {'kind': 'EmaCopy', 'decay': 0.5}"),
        ("missing", "there is no such file"),
        ("late", "after the weights have moved"),
    ],
)
def test_teacher_of_earlier_weights_refusals(measured: Any, world: int, what: str, named: str) -> None:
    assert named in measured(world, "copies")[what]


@pytest.mark.parametrize(
    "given", [{"teacher": "ema"}, {"teacher": "lagged"}, {"decay": 0.5}, {"teacher": "ema", "decay": 0.5, "lag": 1}]
)
def test_decay_and_lag_belong_to_their_teachers(given: dict) -> None:
    from verl_opsd.errors import OpsdError
    from verl_opsd.verl_adapter.loss import OpsdLoss

    with pytest.raises(OpsdError, match="decay belongs"):
        OpsdLoss(**given)


def test_adapters_off_is_the_base_and_touches_one_flag(measured: Any) -> None:
    found = measured(1, "adapters_off")
    assert found["error"] < 1e-4 < 0.1 < found["adapter"]
    assert found["flags"]


@each_world
def test_uneven_passes_make_equal_forwards(measured: Any, world: int) -> None:
    found = measured(world, "uneven")
    assert len(found["passes"]) == world and (world == 1 or found["passes"][0] > found["passes"][1])
    assert found["forwards"] == [max(found["passes"])] * world
    assert all(all(ok) for ok in found["shapes"])


@pytest.mark.parametrize("limit", ["tokens", "sequences"])
def test_grouped_scoring_equals_one_at_a_time(measured: Any, limit: str) -> None:
    found = measured(1, "grouping")[limit]
    assert found["error"] < 1e-5
    assert found["forwards"] < found["alone"]


# ---- controls, checks, guards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "setting"), [(1, "lora"), (1, "full"), (1, "dynamic"), (2, "lora"), (2, "full")])
def test_identity_and_shifted_control(measured: Any, world: int, setting: str) -> None:
    found = measured(world, "control")[setting]
    assert found["rows"]
    assert found["identity"]["mean"] <= 1e-6 and found["identity"]["max"] <= 1e-6 and found["agree"]["min"] == 1
    assert found["shifted"]["mean"] > 1e-2
    assert found["view_is_training"] < 1e-6  # adapters on, teacher's view: what a training step measures
    assert found["grads"] == 0


def test_logprobs_are_the_trained_models(measured: Any) -> None:
    for name, found in measured(1, "logprobs").items():
        if name != "seconds":
            assert found["error"] < 1e-4 and found["dtype"] == "float32" and found["shapes"] == [[2, 384], [1, 384]]


@each_world
def test_a_rehearsal_replaces_lora_b_alone_and_gives_it_back_bit_for_bit(measured: Any, world: int) -> None:
    found = measured(world, "rehearsal")
    assert found["restored"] and found["still"] and found["others"] and found["optimizer"]
    assert found["doubled"] and found["repeats"] and found["chosen"] < 1e-5
    assert len(found["scales"]) == 21 and min(found["scales"]) > 0.1 and max(found["scales"]) < 0.15  # of 0.125
    assert (
        len(set(found["firsts"][0])) == 21
    )  # values of its own for every tensor, the same on every rank and for any number of ranks
    assert all(f == measured(1, "rehearsal")["firsts"][0] for f in found["firsts"])


def test_what_a_server_lacks_of_a_rehearsed_move(measured: Any) -> None:
    """Share by least squares, and what is left beside it, of an engine that keeps the trained values in some places."""
    found = measured(1, "rehearsal")
    move = np.array(found["move"])
    lacking = {}
    for name, made in found["ignored"].items():
        (share,), *_ = np.linalg.lstsq(move[:, None], np.array(made), rcond=None)
        rest = np.linalg.norm(np.array(made) - share * move) ** 2 / np.linalg.norm(move) ** 2
        assert unmade(move, np.array(made), 0.0) == pytest.approx((share, rest), abs=1e-9)
        lacking[name] = max(abs(share - 1), rest)
    assert lacking["nothing"] < 1e-9 and lacking["all"] == pytest.approx(1, abs=1e-6)
    assert min(lacking["a layer"], lacking["the mlp"]) > 0.1, lacking  # one of 3 layers, 3 of 7 projections


@each_world
def test_checks_pass_on_a_sound_engine(measured: Any, world: int) -> None:
    for name in ("untied", "tied"):
        found = measured(world, "checks")[name]
        assert found["required"] == "passed" and found["same"] == 1 and found["shares"]
        assert all(c["passed"] for c in found.values() if isinstance(c, dict))
    assert "adapters_bound" not in measured(world, "checks")["tied"]  # full-parameter
    assert measured(world, "checks")["untied"]["adapters_bound"]["value"] == 42


def test_layout_check_turns_packing_off(measured: Any) -> None:
    found = measured(1, "checks")["hybrid"]
    assert not found["layout"]["passed"] and found["layout"]["value"] > 100 * found["layout"]["threshold"]
    assert not found["shares"] and "one row a forward" in found["layout"]["note"]
    assert found["required"] == "passed"  # a recorded verdict, not a reason to stop


def test_logits_changed_after_the_head_are_found(measured: Any) -> None:
    found = measured(1, "checks")["granite"]
    assert not found["head_equals_logits"]["passed"]
    assert "head_equals_logits" in found["required"]


def test_hybrid_is_right_packed_and_one_row_a_forward(measured: Any) -> None:
    """Decays are exponentials of sums: the gradient is known no better than half a unit in the parameters' last place moves it."""
    found = measured(1, "hybrid")
    assert found["shares"]
    rounding = found["half_an_ulp"]["grad"]
    assert rounding < 1e-3
    for name in ("told", "packed", "dynamic"):
        assert found[name]["loss"] < 1e-5 and found[name]["grad"] < max(GRADIENT, rounding)
    assert found["overruled"]["grad"] > 1e-2  # the fault that the check is there for


@each_world
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_nonfinite_gradient_stops_every_rank_before_a_change(measured: Any, world: int, value: str) -> None:
    found = measured(world, "nonfinite")[value]
    assert len(found["raised"]) == world and all("gradient norm" in m for m in found["raised"])
    assert all(found["unchanged"]) and found["steps"] == 0


REFUSED = {
    "fsdp1": "strategy=fsdp2",
    "ulysses": "ulysses_sequence_parallel_size=1",
    "lm_head": "leave lm_head out",
    "fused": "use_fused_kernels=false",
    "adapter_off": "reference=initial",
    "unscored": "train_mini_batch",
    "other_length": "one hidden state",
    "other_token": "is scored against",
    "fields": "opsd_view_len",
    "shift": "smaller shift",
    "moved": "weights have moved",
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_refusals_name_the_way_out(measured: Any, what: str) -> None:
    assert REFUSED[what] in measured(1, "refusals")[what]


# ---- numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["bf16", "fp32"])
def test_adapters_are_fp32_and_all_of_them_move(measured: Any, base: str) -> None:
    found = measured(1, "adapter_dtype")[base]
    assert found["base"] == {"bf16": "torch.bfloat16", "fp32": "torch.float32"}[base]
    assert found["adapters"] == ["torch.float32"]
    assert found["moved"] > 0.999  # at a learning rate of 1e-5; adapters in bf16 move by a few per cent
    # theta 10,000 over heads of 12 numbers; as bf16 they would be off by 1e-3
    assert found["frequencies"] == [pytest.approx([10000 ** (-i / 6) for i in range(6)], rel=1e-6)]
    # 3 layers of 11 tensors, embedding, head and final norm; an A and a B for each of 7 projections of every layer
    assert (found["stats"].pop("parameters"), found["stats"].pop("compute")) == (3 * 11 + 3 + 42, "bfloat16")
    assert found["stats"] == {"tensors": 42, "dtypes": ["float32"], "max_abs_B": pytest.approx(found["max_abs_B"])}


def test_bf16_compute_stays_near_fp32(measured: Any) -> None:
    found = measured(1, "bf16")
    assert found["mean"] > 0.1 and found["kl"] < 2e-2
    assert found["cosine"] > 0.998


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layout_threshold_tells_leakage_from_rounding(measured: Any, dtype: str) -> None:
    sound, limit = measured(1, "bf16")["layout"][f"untied_{dtype}"]
    leaking, _ = measured(1, "bf16")["layout"][f"hybrid_{dtype}"]
    assert 2 * sound < limit < leaking / 2


def test_position_ids_of_images_are_those_of_text(measured: Any) -> None:
    found = measured(1, "rope")
    assert found["packed"] == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert found["padded"] == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]]


def test_a_multimodal_checkpoint_is_trained_as_its_text_model_and_published_as_it_is_stored(measured: Any) -> None:
    found = measured(1, "multimodal")
    assert found["grads_True"] == found["grads_False"] == 0.0
    assert all(found["same_True"]) and all(found["same_False"])
    text = {n for n in found["stored"] if "visual" not in n}
    assert set(found["names_False"]) == text and len(text) < len(found["stored"])
    modules = {n.removeprefix("base_model.model.").split(".lora_")[0] + ".weight" for n in found["names_True"]}
    assert "the student" in found["cut"] and "lack model.layers.1.mlp.up_proj.weight" in found["cut"]
    assert modules and modules < text and "model.language_model.layers.0.mlp.up_proj.weight" in modules


def test_other_losses_take_verls_path(measured: Any) -> None:
    found = measured(1, "own_path")
    assert found["loss"] < 1e-5 and found["grad"] < GRADIENT


# ---- workers --------------------------------------------------------------------------------------------------------------


@each_world
def test_update_scores_once_for_all_epochs(measured: Any, world: int) -> None:
    found = measured(world, "worker")
    assert found["lengths"] == [2 * found["tokens"]]  # two epochs, every loss position, all ranks
    assert found["flat"] and found["steps"] == [0, 1, 2, 3] and len(found["losses"]) == len(found["norms"]) == 4
    assert found["weighted"] == pytest.approx(found["losses"][0], abs=1e-5)
    # 8 rows, 2 a forward, split over ranks: 4 student forwards an epoch in all, and one scoring pass
    assert found["forwards"] == [(8 + 4) // world] * world
    assert found["given_forwards"] == [8 // world] * world
    assert found["same"]


def test_ranks_that_disagree_about_scoring_stop(measured: Any) -> None:
    assert all("1 of 2 ranks" in m for m in measured(2, "worker")["disagree"])


@each_world
def test_loss_is_checked_when_it_is_set(measured: Any, world: int) -> None:
    assert "lora_rank > 0" in measured(world, "worker")["set_loss"]


@each_world
def test_remote_methods(measured: Any, world: int) -> None:
    found = measured(world, "remote")
    assert found["engine"] == "OpsdEngine" and found["passed"]
    assert (found["stats"].pop("parameters"), found["stats"].pop("compute")) == (3 * 11 + 3 + 42, "float32")
    assert found["stats"] == {"tensors": 42, "dtypes": ["float32"], "max_abs_B": 0.0}  # a fresh adapter
    assert found["identity"]["max"] <= 1e-6 and found["shifted"]["mean"] > 1e-2
    assert "opsd_control_teacher" in found["unnamed"]
    assert found["logprobs"] == [[[2, 384]], *[[]] * (world - 1)]


@each_world
def test_peft_loads_the_exported_adapter(measured: Any, world: int) -> None:
    c = measured(world, "export")
    assert c["files"] == ["adapter_config.json", "adapter_model.safetensors"] and c["beside"] == ["adapter"]
    assert c["dtypes"] == ["torch.float32"] and c["base"]
    assert c["moved"] > 1e-2 and c["gap"] < 1e-5
