"""The canary's limits, its values, and that it ends a run."""

import dataclasses
import json

import pytest
from synthetic import PATCH, episode, turn

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.canary import DEFAULT, Limit, check, read_limits, write_down
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.store import EpisodeStore

BIG = PATCH.format("a.py", 1) + "+" + "x" * 4000 + "\n"


def trained(round_, version, commands):
    turns = [turn("", (c, "", 0)) for c in commands]
    e = episode(f"train-{round_:05d}-00000-0", (turns, turns), patches=(BIG, BIG), statuses=("LimitsExceeded",) * 2)
    return dataclasses.replace(e, split="train", model_version=version)


GOOD = ["sed -i s/a/b/ x", "pytest", "git diff", *["ls"] * 7]  # 10% write, 10% test, 10% inspect
SILENT = ["git diff", *["send_message agent2 'x'"] * 9]


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    store = EpisodeStore(run.episodes)
    for round_, commands in enumerate((GOOD, GOOD, SILENT, GOOD), 1):
        store.write(trained(round_, round_ - 1, commands))
    return run


def gate(run, name):
    return [x for line in (run.path / "evidence.jsonl").read_text().splitlines() if (x := json.loads(line))["gate"] == name]


def test_the_limits_that_ship_are_those_of_the_field_experiments():
    assert read_limits(DEFAULT) == {
        "action_write": Limit(least=0.10),
        "action_test": Limit(least=0.04),
        "action_git_inspect": Limit(most=0.22),
        "patch_bytes": Limit(least=3000),
    }


def test_a_policy_inside_its_limits_goes_on(run):
    values = check(run, 1, 2, read_limits(DEFAULT))
    assert (values["action_write"], values["action_coordinate"], values["submitted"]) == (0.1, 0.0, 0.0)
    (line,) = gate(run, "canary")
    assert line["verdict"] == "pass" and "rounds 1 to 2, 2 episodes" in line["detail"]


def test_a_policy_that_stopped_writing_ends_the_run(run):
    with pytest.raises(OpsdError, match="outside: action_write, action_test"):
        check(run, 3, 3, read_limits(DEFAULT))
    (line,) = gate(run, "canary")
    assert line["verdict"] == "fail" and "'action_write': 0.1" in line["detail"]  # what it was before any update


def test_the_window_is_its_rounds_alone(run):
    with pytest.raises(OpsdError, match=r"outside: action_write;"):
        check(run, 3, 4, {"action_write": Limit(least=0.06)})  # 0.05 over both rounds
    check(run, 4, 4, {"action_write": Limit(least=0.06)})


def test_no_value_is_outside(run):
    with pytest.raises(OpsdError, match="canary"):
        check(run, 9, 9, read_limits(DEFAULT))


def test_limits_are_on_record_before(run):
    write_down(run, DEFAULT)
    (line,) = gate(run, "canary_limits")
    assert line["value"]["action_test"] == {"least": 0.04, "most": None} and "sha256" in line["detail"]


@pytest.mark.parametrize(
    "text",
    ["action_write: {}", "vibes: {least: 1}", "action_write: {least: lots}", "[]", "action_write: {atmost: 1}", ""]
    + [f"action_write: {{{bound}}}" for bound in ("most: .inf", "least: -.inf", "least: .nan", "least: true")],
)
def test_bad_limits_are_refused(tmp_path, text):
    (tmp_path / "l.yaml").write_text(text)
    with pytest.raises(OpsdError, match=r"l\.yaml"):
        read_limits(tmp_path / "l.yaml")
    with pytest.raises(OpsdError, match=r"no\.yaml"):
        read_limits(tmp_path / "no.yaml")


def test_keys_of_the_canary():
    from test_plan import parse

    online = {"mode": "online", "tasks": {"train": "pocket_train"}}
    assert parse(canary={"every": 2}, **online).canary.every == 2
    for wrong in ({"every": 0}, {"limits": "x"}):
        with pytest.raises(OpsdError, match="canary"):
            parse(canary=wrong, **online)
    with pytest.raises(OpsdError, match="canary"):
        parse(canary={"every": 1})  # an evaluation has no rounds
