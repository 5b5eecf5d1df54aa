"""Checkpoints by what they do: gates as data, the base as an arm, the validation loss beside."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from verl_opsd.cli.main import parser
from verl_opsd.cli.select import select
from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.selection import DEFAULT, QualificationGate, chosen, read_gates, scan, val_losses
from verl_opsd.evidence.invalidation import invalidate
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.tokens import AgentOutcome, Episode, EpisodeStore, FeatureGrade, Grade

CONTRACT = EvalContract().hash


def episode(name: str, patches: str, submitted: str, passed: str) -> Episode:
    """``patches``, ``submitted``, ``passed``: a 1 or 0 for each agent."""
    grade = Grade("clean", None, {}, tuple(FeatureGrade(i + 1, c == "1", 1, 0, 0) for i, c in enumerate(passed)))
    agents = tuple(
        AgentOutcome(f"agent{i}", i, "Submitted" if s == "1" else "LimitsExceeded", 3, "diff" if p == "1" else "", 0, False)
        for i, p, s in zip((1, 2), patches, submitted, strict=True)
    )
    return Episode(
        name, "r", 1, (1, 2), "eval", CONTRACT, "scored", (), agents, grade, {}, 0, messages={"agent1": [], "agent2": []}
    )


BASE = [episode("a", "10", "10", "10"), episode("b", "11", "11", "00")]
LOUD = [episode("a", "00", "11", "00"), episode("b", "10", "11", "10")]  # hands in one patch of four
GOOD = [episode("a", "11", "11", "11"), episode("b", "10", "01", "10")]


def test_shares_and_verdicts_by_hand():
    arms = scan({"step9": LOUD, "base": BASE, "step5": GOOD}, "base", DEFAULT, {"step9": 0.1, "step5": 0.4})
    assert [a.name for a in arms] == ["base", "step9", "step5"]
    base, loud, good = arms
    assert [(v.gate, v.value.numerator, v.value.denominator, v.passed) for v in loud.verdicts] == [
        ("A", 3, 4, False),
        ("C", 4, 4, True),
    ]
    assert [(v.value.numerator, v.passed) for v in good.verdicts] == [(1, True), (3, True)]
    assert (base.features.value, loud.features.value, good.features.value) == (1 / 4, 1 / 4, 3 / 4)
    assert (loud.val_loss, good.val_loss, base.val_loss) == (0.1, 0.4, None)
    # the lowest validation loss is that of the arm that does not qualify
    assert chosen(arms, "base") == "step5"


def test_nothing_is_chosen_that_does_not_beat_the_base():
    arms = scan({"base": GOOD, "step1": BASE}, "base", DEFAULT, {})
    assert all(a.qualified for a in arms) and chosen(arms, "base") is None


def test_gates_of_a_file_and_over_the_base(tmp_path: Path):
    path = tmp_path / "gates.json"
    path.write_text(json.dumps([{"name": "B", "metric": "submitted", "over_base": 0.2}]))
    gates = read_gates(path)
    assert gates == (QualificationGate("B", "submitted", over_base=0.2),)
    arms = scan({"base": BASE, "more": LOUD, "same": GOOD}, "base", gates, {})
    assert [a.qualified for a in arms] == [False, True, False]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "gates.json"),
        ('[{"name": "A", "metric": "submitted", "least": 0.6, "most": 0.5}]', "no value passes it"),
        ('[{"name": "A"}]', "metric"),
        ('[{"name": "A", "metric": "no_such", "least": 1}]', "'no_such'"),
        ('[{"name": "A", "metric": "submitted"}]', "without a bound"),
        (
            '[{"name": "A", "metric": "submitted", "least": 1}, {"name": "A", "metric": "submitted", "most": 1}]',
            "names of their own",
        ),
        ("[]", "names of their own"),
        *(
            (f'[{{"name": "A", "metric": "submitted", "{side}": {bound}}}]', "finite")
            for side, bound in (
                ("least", '"0.5"'),
                ("most", "Infinity"),
                ("least", "-Infinity"),
                ("most", "NaN"),
                ("over_base", "true"),
            )
        ),
    ],
)
def test_gates_that_are_refused(text, what, tmp_path: Path):
    (tmp_path / "gates.json").write_text(text)
    with pytest.raises(OpsdError, match=what):
        read_gates(tmp_path / "gates.json")


def test_a_scan_needs_its_base_and_the_same_pairs():
    with pytest.raises(OpsdError, match="untouched base"):
        scan({"step1": GOOD}, "base", DEFAULT, {})
    with pytest.raises(OpsdError, match="step1 played other pairs"):
        scan({"base": BASE, "step1": GOOD[:1]}, "base", DEFAULT, {})


def test_the_command_reads_the_split_that_is_named(tmp_path: Path):
    for name, episodes in (("base", BASE), ("step5", GOOD)):
        for e in episodes:
            EpisodeStore(tmp_path / name / "episodes").write(dataclasses.replace(e, split="train"))
    words = ["select", *(f"{n}={tmp_path / n}" for n in ("base", "step5")), "--base", "base"]
    with pytest.raises(OpsdError, match="no eval episodes"):
        select(parser().parse_args(words), Console(quiet=True))
    assert select(parser().parse_args([*words, "--split", "train"]), Console(quiet=True)) == 0


def test_the_command(tmp_path: Path):
    for name, episodes in (("base", BASE), ("step5", GOOD)):
        store = EpisodeStore(tmp_path / name / "episodes")
        for e in episodes:
            store.write(e)
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"step": 5, "data": {"train/loss": 1.0}}, {"step": 5, "data": {"val/loss": 0.75}}]
    metrics.write_text("\n".join(map(json.dumps, lines)))
    assert val_losses(metrics) == {5: 0.75}
    console = Console(record=True, width=200)
    runs = [f"{n}={tmp_path / n}" for n in ("base", "step5")]
    args = parser().parse_args(["select", *runs, "--base", "base", "--losses", str(metrics)])
    assert select(args, console) == 0
    text = console.export_text()
    assert "chosen: step5" in text and "0.7500" in text and "3 of 4" in text


def test_of_equal_arms_the_first_named_is_chosen():
    for names in (("step7", "step2"), ("step2", "step7")):
        arms = scan({"base": BASE, **dict.fromkeys(names, GOOD)}, "base", DEFAULT, {"step7": 0.9, "step2": 0.1})
        assert chosen(arms, "base") == names[0]


@pytest.mark.parametrize(("lines", "what"), [("", "no step"), ('{"step": 9, "data": {"val/loss": 0.5}}', "step9")])
def test_losses_of_no_arm_are_refused(lines, what, tmp_path: Path):
    for name, episodes in (("base", BASE), ("step5", GOOD)):
        for e in episodes:
            EpisodeStore(tmp_path / name / "episodes").write(e)
    (tmp_path / "metrics.jsonl").write_text(lines)
    words = ["select", *(f"{n}={tmp_path / n}" for n in ("base", "step5")), "--base", "base"]
    args = parser().parse_args([*words, "--losses", str(tmp_path / "metrics.jsonl")])
    with pytest.raises(OpsdError, match=f"validation losses of {what}"):
        select(args, Console(quiet=True))


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 5}', '{"step": 5, "data": {"val/loss": null}}'])
def test_losses_that_are_none_are_refused(text, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(OpsdError, match=r"metrics\.jsonl of a warm start"):
        val_losses(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("name", ["base", "step5"])
def test_what_was_invalidated_is_not_chosen_and_not_chosen_against(name, tmp_path: Path):
    for run, episodes in (("base", BASE), ("step5", GOOD)):
        for e in episodes:
            RunDir(tmp_path / run).store_episode(EpisodeStore(tmp_path / run / "episodes"), e)
        write_json(tmp_path / run / "contract.json", EvalContract().as_dict())
    args = parser().parse_args(["select", *(f"{n}={tmp_path / n}" for n in ("base", "step5")), "--base", "base"])
    assert select(args, Console(quiet=True)) == 0
    assert invalidate(tmp_path / name, "contract", CONTRACT[:12], "another harness")
    console = Console(record=True, width=200)
    assert select(args, console) == 1
    text = console.export_text()
    assert f"{name}: invalidated (contract={CONTRACT[:12]}): another harness" in text and "chosen: none" in text


def test_checkpoints_of_different_contracts_are_refused(tmp_path: Path):
    for run, steps in (("base", 100), ("step5", 200)):
        write_json(tmp_path / run / "contract.json", EvalContract(step_limit=steps).as_dict())
    args = parser().parse_args(["select", *(f"{n}={tmp_path / n}" for n in ("base", "step5")), "--base", "base"])
    with pytest.raises(OpsdError, match="step_limit"):
        select(args, Console(quiet=True))
