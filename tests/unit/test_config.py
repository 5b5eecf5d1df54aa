"""The opsd section: every unknown key, wrong type and contradiction is named; nothing is converted silently."""

import copy

import pytest
from opsd_section import SECTION

from verl_opsd.config import OpsdConfig
from verl_opsd.contract import FOUND
from verl_opsd.errors import OpsdError

GOOD = SECTION | {
    "loss": {"turn_kinds": ["policy"]},
    "contract": {"step_limit": 6, "max_tokens": 64, "context_length": 4096},
}


def changed(path: str, value: object) -> dict:
    values = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    node = values
    for p in parents:
        node = node.setdefault(p, {})
    node[last] = value
    return values


def test_good_section_parses_with_its_values():
    c = OpsdConfig.parse(GOOD)
    assert (c.contract.step_limit, c.loss.turn_kinds, c.brief.placement, c.loss.anchor) == (6, ("policy",), "system", 0.0)


def test_int_becomes_float_without_loss():
    assert OpsdConfig.parse(changed("loss.anchor", 1)).loss.anchor == 1.0


@pytest.mark.parametrize("path", ["lossy", "loss.anchr", "tasks.trian", "contract.steps", "brief.text", "teacher.x"])
def test_unknown_key_is_named(path):
    with pytest.raises(OpsdError, match=f"opsd.{path}"):
        OpsdConfig.parse(changed(path, 1))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("loss.anchor", "0.5"),
        ("loss.epochs", 1.5),
        ("loss.epochs", True),
        ("loss.divergence", "kl"),
        ("tasks.prepare", 1),
        ("brief.placement", "think"),
        ("contract.step_limit", "200"),
        ("mode", "off"),
        ("tasks", "pocket"),
    ],
)
def test_wrong_type_or_choice_is_named(path, value):
    with pytest.raises(OpsdError, match=f"opsd.{path}"):
        OpsdConfig.parse(changed(path, value))


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher.kind": "device"},
        {"teacher.path": "somewhere"},
        {"sandbox.backend": "process"},
        {"sandbox.graders": 0},
        {"contract.sandbox": "docker"},
        {"loss.divergence": "jsd"},
        {"loss.divergence": "skewed_reverse_kl"},
        {"loss.top_k": 20},
        {"loss.support": "union_topk"},
        {"loss.skew": 0.5},
        {"loss.beta": 0.5},
        {"loss.anchor": -0.1},
        {"loss.epochs": 0},
        {"loss.anchor": float("nan")},
        {"loss.threshold": {"above": float("inf")}},
        {"loss.threshold": {"above": -0.01}},
        {"loss.threshold": {"above": 0.05, "denominator": "none"}},
        {"loss.threshold": {"above": 0.05, "denominator": "kept"}, "loss.reduction": "turn"},
        {"loss.threshold": {"above": 0.05, "denominator": "kept"}, "loss.anchor": 0.5},
        {"loss.turn_half_life": 0},
        {"loss.task_reward_coef": -1.0},
        {"loss.task_reward_coef": 0.1, "contract.temperature": 0.7},
        {"loss.task_reward_coef": 0.1, "loss.threshold": {"above": 0.05, "denominator": "kept"}},
        {"loss.divergence": "k2", "contract.top_p": 0.9},
        {"loss.divergence": "k2", "contract.top_k": 20},
        {"loss.divergence": "k2", "contract.temperature": 0.7},
        {"loss.divergence": "k2", "loss.threshold": {"above": 0.05}},
        {"loss.divergence": "k2", "loss.trust": [0.5, 2.0]},
        {"loss.prefix_half_life": -1},
        {"loss.episodes_per_update": 0},
        {"loss.max_prefix": 0},
        {"loss.turn_kinds": []},
        {"loss.turns": []},
        {"loss.anchor_positions": "loss"},
        {"loss.anchor_positions": "all", "loss.anchor": 0.5},
        {"loss.turns": [[3, 3]]},
        {"loss.turns": [[-1, 3]]},
        {"loss.segments": [[0, 10, 20]]},
        {"loss.divergence": "k2", "loss.epochs": 2},
        {"loss.divergence": "k2", "mode": "offline"},
        {"loss.divergence": "k3", "loss.episodes_per_update": 1},
        {"loss.divergence": "policy_gradient", "loss.trust": [0.5, 2.0], "loss.max_log_ratio": 20.0},
        {"loss.class_weights": {"think": -1}},
        {"loss.class_weights": dict.fromkeys(("think", "message", "command", "code", "other"), 0)},
        {"teacher.fp8": "fp8.json"},
        {"teacher.kind": "device", "teacher.path": "m", "teacher.fp8": "fp8.json", "teacher.dtype": "float32"},
        {"teacher.kind": "device", "teacher.path": "m", "teacher.fp8": "fp8.json", "teacher.ranks": 2, "teacher.devices": 2},
        {"teacher.kind": "server", "teacher.path": "m", "teacher.url": "http://h", "teacher.fp8": "fp8.json"},
        {"teacher.kind": "ema"},
        {"teacher.kind": "ema", "teacher.decay": 1.0},
        {"teacher.kind": "ema", "teacher.decay": 0.9, "teacher.lag": 1},
        {"teacher.kind": "lagged", "teacher.lag": 0},
        {"teacher.kind": "frozen", "teacher.decay": 0.9},
        {"teacher.kind": "frozen", "teacher.path": "elsewhere"},
        {"teacher.kind": "ema", "teacher.decay": 0.9, "teacher.cache": True},
        {"loss.divergence": "nll"},
        {"loss.divergence": "nll", "brief.name": "none", "loss.anchor": 0.5},
        {"loss.divergence": "nll", "brief.name": "none", "teacher.kind": "frozen"},
        {"loss.divergence": "nll", "brief.name": "none", "loss.threshold": {"above": 0.05, "taken": "collection"}},
        {"loss.divergence": "k2", "loss.threshold": {"above": 0.05, "taken": "collection"}},
        {"loss.segments": [[0, 10], [4096, 5000]]},
        {"loss.turns": [[0, 2], [6, 9]]},
        {"gates.identity_end_max": -1.0},
        {"activations.offload": True},
        {"activations.offload": False},
        {"activations.device_gb": 80.0},
        {"activations.keep": "none", "activations.device_gb": 80.0},
        {"activations.keep": "auto", "activations.device_gb": 0.0},
        {"activations.keep": "all"},
        {"brief.too_long": "window"},
        {"brief.window_context": 10},
        {"brief.too_long": "window", "brief.window_context": 100, "brief.max_view_tokens": 100},
        {"brief.too_long": "window", "brief.window_context": -1, "brief.max_view_tokens": 100},
        {"tasks.max_train": 0},
        {"reward.clean_merge": -0.1},
        {"reward.clean_merge": 0.3, "reward.non_empty": 0.2},
        {"tasks.look": "the final table"},
        {"tasks.test": "pocket_test", "tasks.look": "final"},
        {"tasks.max_eval": -1},
        {"brief.max_view_tokens": 0},
        {"gates.identity_max": -1e-9},
        {"gates.publish_late_tokens": 127},
        {"contract.grader": "other"},
        {"contract.schema": 7},
        *({f"contract.{name}": "other"} for name in FOUND),
        {"contract.reasoning_parser": "deepseek_r1"},
        {"contract.cost_limit": 3.0},
        {"contract.cost_limit": -1.0},
        {"contract.grade_timeout_s": 0},
        {"varies": "steps"},
        {"varies": "schema"},
        {"scale": "gpux"},
        {"mode": "eval"},
        {"contract.step_limit": 0},
        {"contract.max_tokens": 4096},
    ],
)
def test_contradictions_are_refused(changes):
    values = copy.deepcopy(GOOD)
    for path, value in changes.items():
        node = values
        *parents, last = path.split(".")
        for p in parents:
            node = node.setdefault(p, {})
        node[last] = value
    with pytest.raises(OpsdError, match="rule:"):
        OpsdConfig.parse(values)


def test_ranges_that_begin_inside_the_contract_are_taken():
    values = changed("loss", {"segments": [[4095, 9000]], "turns": [[5, 100]]})
    assert OpsdConfig.parse(values).loss.turns == ((5, 100),)
    compacted = changed("contract.compaction", True) | {"loss": {"turns": [[6, 9]]}}  # a summary is a turn, and no step
    assert OpsdConfig.parse(compacted).loss.turns == ((6, 9),)


def test_missing_key_is_named():
    values = {k: v for k, v in GOOD.items() if k != "recipe"}
    with pytest.raises(OpsdError, match=r"opsd\.recipe"):
        OpsdConfig.parse(values)
