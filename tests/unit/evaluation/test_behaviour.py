"""Every behaviour metric on logs whose answers were worked out by hand, and what must not change them."""

import dataclasses
import random
import time

import pytest
from synthetic import PATCH, episode, long_episodes, turn, write_logs

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.behaviour.definitions import DEFINITIONS
from verl_opsd.evaluation.behaviour.log_tree import read_log_tree
from verl_opsd.evaluation.behaviour.table import behaviour, distance, drift, reference
from verl_opsd.evaluation.standings import standing

SENT1, SENT2 = ("Message sent to agent1", 0), ("Message sent to agent2", 0)
QUESTION = "I'll take parser.py. Which files do you need?"
OWN, CLAIM1, CLAIM2, LABELS = (
    "I own lexer.py",
    "CLAIM\n- lexer.py\n- tokens",
    "CLAIM\n- lexer.py\n- tokens.",
    "Intent: parse\nApproach: simple",
)


def first():
    one = [
        turn("Let me message agent2 first.", (f'send_message agent2 "{QUESTION}"', *SENT2)),
        turn("Looking.", ("cat parser.py", "x", 0), inbox=[("agent2", OWN)]),
        turn("I will tell my colleague later.", ("sed -i 's/a/b/' parser.py", "", 0), inbox=[("agent2", CLAIM1)]),
        turn("", ("pytest -q", "E assert\n1 failed in 0.11s", 1), inbox=[("agent2", CLAIM2)]),
        turn("", ("pytest  -q", "E assert\n1 failed in 0.12s", 1)),
        turn("", ("git checkout -- parser.py", "", 0)),
        turn("", ("git fetch origin && git merge --no-commit --no-ff origin/agent2", "CONFLICT (content): in parser.py", 1)),
        turn("", ("cat > parser.py <<'EOF'\nx = 1\nEOF", "", 0)),
        turn("", ("git merge --no-commit --no-ff origin/agent2", "Automatic merge went well", 0)),
        turn(
            "",
            (
                "git push origin agent1 && gh pr create --title t",
                "opened PR for agent1: t\nWARNING: your branch conflicts with agent2's.",
                0,
            ),
        ),
        turn("", ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "", 0)),
    ]
    two = [
        turn("", (f"send_message --wait agent1 '{OWN}'", *SENT1), inbox=[("agent1", QUESTION)]),
        turn("", (f"send_message agent1 <<'MSG'\n{CLAIM1}\nMSG", *SENT1)),
        turn("", (f"send_message agent1 <<'MSG'\n{CLAIM2}\nMSG", *SENT1)),
        turn("", (f"send_message agent1 <<'MSG'\n{LABELS}\nMSG", *SENT1)),
        turn("", ("send_message agent1 hello", "send_message: could not parse that call, so nothing was sent.", 1)),
        turn("", ("ls", "parser.py", 0)),
    ]
    patch = PATCH.format("src/parser.py", 10)
    return episode("x", (one, two), passed=(True, False), patches=(patch, ""), statuses=("Submitted", "LimitsExceeded"))


def second():
    """Both hand in the same patch and pass; nobody speaks; one ends in an error."""
    write = [turn("", ("tee a.py <<E\nhi\nE", "hi", 0))]
    submit = [*write, turn("", ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "", 0))]
    patch = PATCH.format("a.py", 1)
    return episode(
        "y",
        (submit, write),
        passed=(True, True),
        merge="identical",
        patches=(patch, patch),
        statuses=("Submitted", "Error"),
        t_end=1060.0,
    )


#: metric -> (numerator, denominator) of the first and of the second pair; for medians the values.
BY_HAND = {
    "messages_per_pair": ((5, 1), (0, 1)),
    "messages_median": ([5], [0]),
    "message_chars": ([45, 14, 25, 26, 30], []),
    "near_duplicate_share": ((1, 5), (0, 0)),
    "division_share": ((4, 5), (0, 0)),
    "question_share": ((1, 5), (0, 0)),
    "answer_rate": ((1, 1), (0, 0)),
    "answered_promptly": ((1, 5), (0, 0)),
    "wait_share": ((1, 5), (0, 0)),
    "undelivered_share": ((1, 6), (0, 0)),
    "opening_division": ((2, 2), (0, 0)),
    "protocol_share": ((1, 5), (0, 0)),
    "plan_first": ((1, 2), (0, 2)),
    "follow_through": ((1, 2), (0, 0)),
    "peer_mention_share": ((2, 17), (0, 3)),
    "commitment_share": ((2, 2), (0, 0)),
    "acted_share": ((1, 2), (0, 0)),
    "intention_gap": ((1, 2), (0, 0)),
    "claims_per_pair": ((2, 1), (0, 1)),
    "boards_per_pair": ((2, 1), (0, 1)),
    "split_stated": ((1, 1), (0, 1)),
    "reviewer_wrote_nothing": ((1, 1), (0, 1)),
    "handoff_identical": ((0, 1), (1, 1)),
    "action_coordinate": ((6, 17), (0, 3)),
    "action_git_publish": ((1, 17), (0, 3)),
    "action_git_inspect": ((2, 17), (0, 3)),
    "action_test": ((2, 17), (0, 3)),
    "action_write": ((2, 17), (2, 3)),
    "action_explore": ((2, 17), (0, 3)),
    "action_other": ((2, 17), (1, 3)),
    "merge_clean_both": ((0, 1), (0, 1)),
    "merge_clean_one_empty": ((1, 1), (0, 1)),
    "merge_both_empty": ((0, 1), (0, 1)),
    "merge_identical": ((0, 1), (1, 1)),
    "merge_conflicts": ((0, 1), (0, 1)),
    "merge_missing_input": ((0, 1), (0, 1)),
    "merge_error": ((0, 1), (0, 1)),
    "dry_runs": ((2, 2), (0, 2)),
    "saw_conflict": ((1, 2), (0, 2)),
    "shim_warned": ((1, 2), (0, 2)),
    "conflict_acted_on": ((1, 1), (0, 0)),
    "opened_pr": ((1, 2), (0, 2)),
    "published": ((1, 2), (2, 2)),
    "late_merge_check": ((1, 1), (0, 2)),
    "rechecks": ((1, 1), (0, 0)),
    "reverified": ((1, 1), (0, 0)),
    "repeated_commands": ((1, 17), (0, 3)),
    "same_error": ((3, 2), (0, 2)),
    "reverts": ((1, 2), (0, 2)),
    "longest_without_edit": ((10, 2), (1, 2)),
    "features_passed": ((1, 2), (2, 2)),
    "pairs_passed": ((0, 1), (1, 1)),
    "pairs_any": ((1, 1), (1, 1)),
    "submitted": ((1, 2), (1, 2)),
    "limits_exceeded": ((1, 2), (0, 2)),
    "ended_in_error": ((0, 2), (1, 2)),
    "empty_patches": ((1, 2), (0, 2)),
    "patch_bytes": ([len(PATCH.format("src/parser.py", 10)), 0], [len(PATCH.format("a.py", 1))] * 2),
    "patch_bytes_non_empty": ([len(PATCH.format("src/parser.py", 10))], [len(PATCH.format("a.py", 1))] * 2),
    "patch_kb_per_pair": ((len(PATCH.format("src/parser.py", 10)) / 1000, 1), (2 * len(PATCH.format("a.py", 1)) / 1000, 1)),
    "minutes_per_pair": ((2, 1), (1, 1)),
    "steps": ([11, 6], [2, 1]),
}


def rows(models, name="m"):
    return {m.key: m.values[name] for m in behaviour(models).metrics}


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_every_metric_by_hand(which):
    episodes = [(first, second)[i]() for i in which]
    got = rows({"m": episodes})
    assert list(got) == list(BY_HAND) == list(DEFINITIONS)
    for key, parts in BY_HAND.items():
        chosen = [parts[i] for i in which]
        if isinstance(chosen[0], list):
            values = sorted(v for c in chosen for v in c)
            middle = [values[(len(values) - 1) // 2], values[len(values) // 2]] if values else []
            assert (got[key].value, got[key].denominator) == (sum(middle) / 2 if values else None, len(values)), key
            continue
        numerator, denominator = sum(c[0] for c in chosen), sum(c[1] for c in chosen)
        assert (got[key].numerator, got[key].denominator) == (pytest.approx(numerator), denominator), key
        assert got[key].value == (pytest.approx(numerator / denominator) if denominator else None), key


def test_a_patch_that_the_grader_took_nothing_from_is_empty_as_in_the_standings():
    one = first()
    tests_alone = dataclasses.replace(one.grade, apply_status={"agent1": "skipped", "agent2": "skipped"})
    e = dataclasses.replace(one, grade=tests_alone)
    assert (rows({"m": [e]})["empty_patches"].numerator, standing("m", [e]).non_empty.passed) == (2, 0)


def test_strata_pool_pairs_by_their_messages():
    table = behaviour({"m": [first()], "n": [second()]})
    pooled = {(s.low, s.high): (s.pairs, s.conflicts.passed, s.features.passed) for s in table.strata if s.model == "all"}
    assert pooled == {(0, 3): (1, 0, 2), (4, 5): (1, 0, 1), (6, None): (0, 0, 0)}


def test_numbers_link_to_the_episodes_behind_them():
    got = rows({"m": [first(), second()]})
    assert got["near_duplicate_share"].episodes == ("x",) and got["handoff_identical"].episodes == ("y",)
    assert got["pairs_any"].episodes == ("x", "y")


def without(table):
    """A table as plain data."""
    return dataclasses.asdict(table)


def test_order_of_episodes_splits_and_unrelated_runs_change_nothing(tmp_path):
    episodes = [
        dataclasses.replace(f(), episode_id=f"{f.__name__}{k}", t_end=1000.0 + 60 * k)
        for k in range(4)
        for f in (first, second)
    ]
    whole = without(behaviour({"m": episodes}))
    for seed in range(3):
        random.Random(seed).shuffle(episodes)
        assert without(behaviour({"m": episodes})) == whole
    beside = behaviour({"m": episodes, "other": [dataclasses.replace(second(), episode_id="z")]})
    assert {m.key: m.values["m"] for m in beside.metrics} == {m.key: m.values["m"] for m in behaviour({"m": episodes}).metrics}
    assert beside.distance["m"] == whole["distance"]["m"]


def test_a_run_split_into_folders_in_any_order_is_one_run(tmp_path):
    """The harness' log tree: one folder, or two with the files written the other way round."""
    episodes = [
        dataclasses.replace(f(), task_id=k, episode_id=f"{f.__name__}{k}") for k, f in enumerate((first, second, second))
    ]
    for e in episodes:
        write_logs(tmp_path / "whole", "run", e)
    for k, e in enumerate(reversed(episodes)):
        write_logs(tmp_path / f"part{k % 2}", "run", e)
    whole = behaviour({"m": read_log_tree(tmp_path / "whole")})
    parts = [e for k in range(2) for e in read_log_tree(tmp_path / f"part{k}")]
    assert without(behaviour({"m": parts})) == without(whole)
    ours = behaviour({"m": episodes})
    assert {m.key: m.values["m"].value for m in whole.metrics} == {m.key: m.values["m"].value for m in ours.metrics}


def test_faults_are_counted_and_in_no_denominator():
    fault = dataclasses.replace(first(), episode_id="f", outcome="infra:engine_died", grade=None)
    table = behaviour({"m": [first(), fault]})
    assert (table.pairs["m"], table.void["m"]) == (1, 1)
    assert {m.key: m.values["m"] for m in table.metrics} == rows({"m": [first()]})


def test_constant_rows_are_marked():
    table = {
        m.key: m
        for m in behaviour({"a": [first()], "b": [dataclasses.replace(first(), episode_id="x2", t_end=1300.0)]}).metrics
    }
    assert table["answer_rate"].constant and not table["minutes_per_pair"].constant
    assert not {m.key: m for m in behaviour({"a": [first()]}).metrics}[
        "answer_rate"
    ].constant  # one model has nothing to differ from


def test_drift_reads_the_field_experiments_table():
    """Shares of base, teacher and student, and what their log says of each."""
    said = {
        (0.608, 0.445, 0.536): "toward",
        (0.028, 0.095, 0.081): "toward",
        (0.185, 0.213, 0.335): "overshot",
        (0.118, 0.092, 0.062): "overshot",
        (0.058, 0.061, 0.008): "away",  # collapsed: the teacher tests more
        (0.030, 0.054, 0.028): "still",
    }
    assert {k: drift(*k) for k in said} == said
    assert drift(0.1, None, 0.2) is None


def test_drift_of_a_table_is_of_action_shares_against_base_and_teacher():
    table = behaviour(
        {
            "base": [first()],
            "t": [dataclasses.replace(second(), episode_id="t")],
            "s": [dataclasses.replace(second(), episode_id="s")],
        },
        base="base",
        teacher="t",
    )
    found = {m.key: m.drift for m in table.metrics if m.drift}
    assert set(found) == {k for k in DEFINITIONS if k.startswith("action_")}
    assert found["action_write"] == {"s": "toward"}
    for wrong in ({"base": "base"}, {"base": "base", "teacher": "nobody"}, {"base": "base", "teacher": "base"}):
        with pytest.raises(OpsdError, match="base and a teacher"):
            behaviour({"base": [first()]}, **wrong)


def test_the_reference_is_at_no_distance_from_itself_and_doubling_is_ln_2():
    assert distance(reference()) == 0
    twice = {k: 2 * (v + 0.01) - 0.01 for k, v in reference().items()}
    assert distance(twice) == pytest.approx(0.6931, abs=1e-4)
    assert distance({**reference(), "answer_rate": None}) is None


def test_an_episode_given_twice_is_refused():
    with pytest.raises(OpsdError, match="twice"):
        behaviour({"m": [first(), first()]})


@pytest.mark.slow
def test_speed_on_8000_messages_and_200000_commands():
    """In at most 5 s of processor time."""
    episodes = long_episodes()
    started = time.process_time()
    table = behaviour({"m": episodes})
    seconds = time.process_time() - started
    got = {m.key: m.values["m"] for m in table.metrics}
    assert (got["messages_per_pair"].numerator, got["action_coordinate"].denominator) == (8000, 200_000)
    assert seconds <= 5


def test_the_published_strata():
    """The field experiments' pooled table: 11 pairs of at most 3 messages (36% conflicts, 45% of features), 17 of 6 and more (18%, 44%)."""
    episodes = []
    for messages, pairs, conflicts, features in ((2, 11, 4, 10), (6, 17, 3, 15)):
        sends = [turn("", (f"send_message agent2 'note {n}'", *SENT2)) for n in range(messages)] + [turn("")]
        clean = pairs - conflicts
        for k in range(pairs):
            earned = max(0, min(2, features - 2 * k)) if k < clean else 0
            merge = "clean" if k < clean else "conflicts"
            episodes.append(
                episode(
                    f"e{messages}-{k}", (sends, [turn("")]), passed=(earned > 0, earned > 1), merge=merge, patches=("a", "b")
                )
            )
    few, some, many = behaviour({"m": episodes}).strata
    shares = [(s.pairs, round(s.conflicts.value, 2), round(s.features.value, 2)) for s in (few, many)]
    assert shares == [(11, 0.36, 0.45), (17, 0.18, 0.44)] and some.pairs == 0
