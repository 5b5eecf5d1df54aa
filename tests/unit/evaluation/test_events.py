"""What counts as a command, a send and a reading of it; labels of commands."""

import pytest
from synthetic import PATCH, episode, history, turn

from verl_opsd.cooperbench.history import join_segments
from verl_opsd.evaluation.behaviour.actions import label, segments
from verl_opsd.evaluation.behaviour.communication import (
    answered_promptly,
    answered_questions,
    followed_claims,
    follows_protocol,
    is_question,
    near_duplicates,
)
from verl_opsd.evaluation.behaviour.events import Send, stream

LABELLED = [
    ("cd repo && git status", {"git_inspect"}),
    ("cat > a.py <<'EOF'\ngit push\npytest\nEOF", {"write"}),
    ("cat > a.py <<'EOF'\nx\nEOF\npython -m pytest -q 2>&1 | tail -5", {"write", "test", "explore"}),
    ('send_message agent2 "please git push && pytest > log"', {"coordinate"}),
    ("send_message agent2 <<'MSG'\ngit push; pytest\nMSG\nls", {"coordinate", "explore"}),
    ("sed -n '1,5p' f", {"explore"}),
    ("sed -i.bak 's/a/b/' f", {"write"}),
    ("python3 - <<'P'\nopen('f', 'w').write('x')\nP", {"write"}),
    ("python3 - <<'P'\nprint(open('f').read())\nP", {"other"}),
    ("bash -c 'pytest -q'", {"test"}),
    ('grep -rn "a > b" src', {"explore"}),
    ("git commit -am x && git push origin agent1 && gh pr create --title t", {"git_publish"}),
    ("echo x > /dev/null", {"other"}),
    ("ls 2>err.txt", {"explore"}),
    ("echo x >> notes.md", {"write"}),
    ("git merge --no-commit --no-ff origin/agent2", {"git_inspect"}),
    ("git -C x --no-pager diff", {"git_inspect"}),
    ("git apply p.diff", {"write"}),
    ("git stash list", {"git_inspect"}),
    ("grep -c a <<< word\npytest -q", {"explore", "test"}),
    ("git stash", {"other"}),
    ("git tag v1", {"git_publish"}),
    ("gh pr view 1", {"git_inspect"}),
    ("timeout 60 cargo test", {"test"}),
    ("FOO=1 /usr/bin/python3 -m pytest", {"test"}),
    ("./runner.sh a b", {"test"}),
    ("perl -pi -e 's/a/b/' x", {"write"}),
    ("cat a | tee b", {"explore", "write"}),
    ("catalog; grepped; pytester", {"other"}),
    ("echo 'pytest'", {"other"}),
    ("if true; then pytest; fi", {"test"}),
    ("find . -name x | xargs grep y", {"explore"}),
]


@pytest.mark.parametrize("command,wanted", LABELLED)
def test_labels(command, wanted):
    got = label([command])
    assert {k for k, v in got.items() if v[0]} == wanted


def test_labels_of_many_are_those_of_each():
    got = label([c for c, _ in LABELLED])
    for i, (_, wanted) in enumerate(LABELLED):
        assert {k for k, v in got.items() if v[i]} == wanted
    assert all(len(v) == 0 for v in label([]).values()) and segments("  ") == []


def sent(text="hi", **more):
    return Send(
        **{
            "sender": "agent1",
            "to": "agent2",
            "text": text,
            "wait": False,
            "step": 0,
            "t": 0.0,
            "status": "delivered",
            "read_at": None,
        }
        | more
    )


def test_prose_quotes_and_refused_calls_are_no_sends():
    one = [
        turn("I would run send_message agent2 'hello' now", ("ls", "", 0)),
        turn("", ("send_message agent2 'late'", "agent2 has exited. Your message was NOT delivered and no reply", 1)),
        turn("", ("send_message agent3 'x'", "send_message: there is no colleague 'agent3', so nothing was sent.", 1)),
        turn("", ("send_message agent2 'a'\nsend_message agent2 \"b\"", "Message sent to agent2\nMessage sent to agent2\n", 0)),
        turn("", ("send_message agent2 'never run'", "", 0), calls="dropped"),
        turn("", ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "", 0)),
    ]
    pair = stream(episode("e", (one, [turn("", ("ls", "", 0))]), statuses=("Submitted", "LimitsExceeded")))
    assert [(s.text, s.status) for s in pair.sends] == [
        ("late", "peer_gone"),
        ("x", "rejected"),
        ("a", "delivered"),
        ("b", "delivered"),
    ]
    assert [len(s.commands) for s in pair.steps["agent1"]] == [1, 1, 1, 1, 0, 1]
    assert pair.steps["agent1"][-1].commands[0].returncode is None


def test_messages_are_read_in_their_order_from_the_inbox_and_from_waits():
    said = "Message sent to agent1\n\n[Reply from agent1]: second"
    one = [
        turn("", ("send_message agent2 'first'", "Message sent to agent2", 0)),
        turn("", ("send_message agent2 'second'", "Message sent to agent2", 0)),
    ]
    two = [
        turn("", ("ls", "", 0)),
        turn("", ("send_message --wait agent1 'q?'", said, 0), inbox=[("agent1", "first")]),
        turn("", ("ls", "", 0)),
    ]
    pair = stream(episode("e", (one, two), statuses=("LimitsExceeded", "LimitsExceeded")))
    assert {s.text: s.read_at for s in pair.sends} == {"first": 1, "second": 2, "q?": None}


def test_each_reply_answers_one_question_and_only_after_it_was_delivered():
    questions = [sent("a?", read_at=2), sent("b?", step=1, read_at=3)]
    back = {"sender": "agent2", "to": "agent1"}
    assert answered_questions([*questions, sent("x", step=1, **back)]) == (0, 2)
    assert answered_questions([*questions, sent("x", step=3, **back)]) == (1, 2)
    assert answered_questions([*questions, sent("x", step=3, **back), sent("y", step=4, **back)]) == (2, 2)
    assert answered_questions([sent("unread?"), sent("x", step=9, **back)]) == (0, 1)  # nobody knows which came first
    assert answered_questions([sent("unread?", t=5.0), sent("x", t=5.1, **back)]) == (1, 1)
    assert answered_questions([sent("x", t=4.9, **back), sent("late?", t=5.0)]) == (0, 1)


@pytest.mark.parametrize("step,answered", [(6, 0), (7, 1), (11, 1), (12, 0)])
def test_a_prompt_answer_comes_in_five_steps_of_which_the_reading_one_is_the_first(step, answered):
    back = {"sender": "agent2", "to": "agent1"}
    assert answered_promptly([sent("note", read_at=7), sent("x", step=step, **back)]) == answered


@pytest.mark.parametrize("line,kept", [(13, 0), (14, 0), (15, 1)])
def test_a_claim_is_kept_where_edits_have_more_than_three_lines_between_them(line, kept):
    """The owner edits line 10: line 14 leaves 11, 12 and 13 between the two."""
    said = [turn("", ("send_message agent2 'I own a.py'", "Message sent to agent2", 0)), turn("")]
    patches = (PATCH.format("a.py", 10), PATCH.format("a.py", line))
    assert followed_claims(stream(episode("e", (said, [turn("")]), patches=patches))) == (kept, 1)


def test_near_duplicates_ignore_shas_digits_and_case_and_are_per_sender():
    base = "I pushed commit abc1234 of parser.py, tests 12 passed"
    assert near_duplicates([sent(base), sent(base.replace("abc1234", "deadbeef99").replace("12", "7").upper())]) == 1
    assert near_duplicates([sent(base), sent(base, sender="agent2")]) == 0
    assert near_duplicates([sent(base), sent("something else entirely, about the lexer and its states")]) == 0


def test_questions_and_protocol_labels():
    assert is_question("which file?") and not is_question("run `a ? b : c` or ```x?``` see https://x.y/?q=1")
    assert (
        follows_protocol("**Intent:** x\n- Approach: y")
        and not follows_protocol("Intent: x")
        and not follows_protocol("the intent: approach: x")
    )


def test_compacted_histories_join_without_repetition():
    turns = [turn(f"t{n}", ("ls", "", 0)) for n in range(6)]
    whole = history(turns)
    summary = {"role": "assistant", "content": "summary", "extra": {"summary": True}}
    first = whole[: 2 + 2 * 4 - 1]  # the harness closes a segment before the last observation
    second = [*whole[:2], summary, *whole[2 + 2 * 2 :]]
    joined = join_segments(
        [{"kind": "solver", "messages": first}, {"kind": "summarizer", "messages": []}, {"kind": "solver", "messages": second}]
    )
    assert joined == whole
