"""Whole pairs through the real harness classes, in bubblewrap, with scripted models."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor

from scripted_pair import PR, SUBMIT, Script, ScriptedEngine, until

from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.grading import grade_pair
from verl_opsd.cooperbench.harness import run_pair
from verl_opsd.cooperbench.messages import process_store
from verl_opsd.tokens.gateway import ContextOverflow

ONE = (  # what `git diff` says of a new file `one.txt` that holds "one\n"
    "diff --git a/one.txt b/one.txt\nnew file mode 100644\nindex 0000000..5626abf\n--- /dev/null\n+++ b/one.txt\n"
    "@@ -0,0 +1 @@\n+one\n"
)


def gone(agent: str) -> bool:
    """Whether an agent of a running pair has announced its end."""
    return any(key.endswith(f"{agent}:exited") for key in process_store().keys("*"))


def test_agents_message_each_other_submit_and_see_only_their_own_feature(play, pair):
    second = Script([])
    first = Script(
        [
            "send_message agent2 <<'MSG'\nI take one.txt, and \"quotes\" too\nMSG",
            "echo one > one.txt",
            PR,
            until(lambda: any("[Message from agent1" in str(m) for m in second.seen[-1:]), "gh pr list"),
            SUBMIT,
        ]
    )
    second._steps = iter(
        [
            until(lambda: len(first.seen) >= 2, "send_message agent1 'I take two.txt' && echo two > two.txt"),
            PR,
            until(lambda: len(first.seen) >= 4, "gh pr diff agent1"),
            SUBMIT,
        ]
    )
    run = play(first, second)
    one, two = run.agents
    assert (one.status, two.status) == ("Submitted", "Submitted")
    assert (one.feature_id, two.feature_id) == (1, 2)
    assert one.patch == ONE
    assert two.patch == ONE.replace("one", "two").replace("5626abf", "f719efd")
    assert (one.opened_pr, two.opened_pr, one.sent_messages, two.sent_messages) == (True, True, 1, 1)
    assert (one.steps, two.steps) == (len(first.seen), len(second.seen)) == (5, 4)
    received = [m["content"] for m in second.seen[-1] if m["content"].startswith("[Message from")]
    assert received == ['[Message from agent1]: I take one.txt, and "quotes" too']
    assert "[Message from agent1]" not in str(first.seen[-1])
    assert "+one" in second.observations()[-1]
    assert "agent1\\twork" in first.observations()[-1]
    for script, own, other in ((first, 1, 2), (second, 2, 1)):
        task = script.seen[0][1]["content"]
        assert pair.feature_text(own).strip() in task and pair.feature_text(other).strip() not in task
    assert set(run.messages) == {"agent1", "agent2"} and run.messages["agent1"][-1]["role"] == "exit"
    assert process_store().keys("") == []


def test_waiting_for_a_reply(play):
    second = Script([])
    first = Script(['send_message --wait agent2 "which file?"', SUBMIT])

    def asked() -> bool:
        return bool(first.kinds)

    second._steps = iter([until(asked, "sleep 0.3"), 'send_message agent1 "two.txt"', SUBMIT])
    play(first, second)
    assert "Message sent to agent2\\n\\n[Reply from agent2]: two.txt" in first.observations()[0]
    asking = [m["content"] for m in second.seen[-1] if m["content"].startswith("[Message from agent1")]
    assert len(asking) == 1 and "BLOCKED waiting for your reply" in asking[0] and asking[0].endswith("which file?")


def test_a_peer_that_left_is_not_waited_for_and_its_pushed_branch_counts_as_published(play):
    first = Script(["echo one > one.txt; git add -A; git commit -qm work; git push -q", SUBMIT])
    left = until(lambda: gone("agent1"), "true")
    second = Script([left, 'send_message --wait agent1 "still there?"', SUBMIT])
    run = play(first, second)
    assert run.agents[0].patch == ONE and not run.agents[0].opened_pr
    assert "NOT delivered" in second.observations()[-1]
    notes = [m["content"] for m in second.seen[-1] if "has completed their work" in m["content"] and m["role"] == "user"]
    assert len(notes) == 1 and "Their submitted patch is on branch origin/agent1" in notes[0]
    assert run.agents[1].sent_messages == 0


def test_nothing_pushed_is_an_empty_patch_and_the_peer_is_not_sent_to_an_empty_branch(play):
    second = Script([until(lambda: gone("agent1"), "true")])
    run = play(Script([SUBMIT]), second)
    assert [a.patch for a in run.agents] == ["", ""]
    assert "could NOT be published to origin/agent1" in str(second.seen[-1])


def test_unsubmitted_work_is_nudged_and_the_model_never_reads_the_exit_role(play):
    first = Script(["echo one > one.txt", SUBMIT, PR, SUBMIT])
    stubborn = Script(["echo two > two.txt"])
    run = play(first, stubborn)
    assert run.agents[0].patch == ONE and run.agents[0].steps == 4
    assert run.agents[1].patch == "" and run.agents[1].steps == 4  # the command, and three times the end mark
    nudges = [m for m in first.seen[2] if m["role"] == "user" and "You have not submitted anything" in m["content"]]
    assert len(nudges) == 1
    assert {m["role"] for call in first.seen for m in call} == {"system", "user", "assistant", "tool"}
    assert any(m["role"] == "exit" for m in run.messages["agent1"][:-1])  # the harness itself keeps it


def test_step_limit_ends_the_run_without_a_nudge(play):
    first = Script(["echo one > one.txt", "true", "true", "true"], prompt_tokens=500)
    run = play(first, Script([]), contract={"step_limit": 3, "compaction": False, "compaction_trigger": 500})
    assert first.kinds == ["policy"] * 3
    assert (run.agents[0].status, run.agents[0].steps, run.agents[0].patch) == ("LimitsExceeded", 3, "")
    assert "You have not submitted" not in str(run.messages["agent1"])


def test_wall_limit_ends_a_model_call_and_keeps_what_was_pushed(play):
    async def never():
        await asyncio.sleep(60)

    run = play(Script(["echo one > one.txt", PR, never]), Script([]), contract={"wall_limit_s": 3.0})
    assert (run.agents[0].status, run.agents[0].patch) == ("WallLimit", ONE)
    assert run.agents[1].status == "Submitted"
    assert run.seconds < 15


def test_context_overflow_is_an_outcome_of_the_policy(play):
    overflow = ContextOverflow("prompt of 9000 tokens", "it fits into 8192", "shorter")
    run = play(Script(["echo one > one.txt", PR, overflow]), Script([]))
    one = run.agents[0]
    assert (one.status, one.patch) == ("ContextOverflow", ONE) and "9000" in one.error


def test_malformed_replies_and_hostile_commands_are_answered(play):
    bad_json = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{"}}
    first = Script(
        [
            {"role": "assistant", "content": "no call"},
            {"role": "assistant", "content": "", "tool_calls": [bad_json]},
            "true",
            SUBMIT,
        ]
    )
    hostile = [r"printf 'a\xb3\xff'", "cat", "echo \0", "echo '" + "x" * 140_000 + "'", "echo \ud800", "-x", "exit 7"]
    second = Script(hostile)
    run = play(first, second)
    assert first.kinds == ["malformed", "malformed", "policy", "policy"]
    assert run.agents[0].status == "Submitted" and run.agents[0].steps == 4
    assert first.seen[1][-1]["role"] == "user" and "No tool calls found" in first.seen[1][-1]["content"]
    assert "Error parsing tool call arguments" in first.seen[2][-1]["content"]
    seen = [json.loads(o) for o in second.observations()]
    assert seen[0]["output"] == "a\ufffd\ufffd"
    assert seen[1] == {"returncode": 0, "output": ""}
    assert "null byte" in seen[2]["exception_info"]
    assert "Argument list too long" in seen[3]["exception_info"]
    assert "Unicode" in seen[4]["exception_info"]
    assert "-x: command not found" in seen[5]["output"]
    assert [s["returncode"] for s in seen] == [0, 0, -1, -1, -1, 127, 7]


def test_command_over_its_limit_is_killed_and_the_agent_is_told(play):
    first = Script(["echo before; sleep 50 & sleep 50", "pgrep sleep || echo none", SUBMIT])
    play(first, Script([]), contract={"command_timeout_s": 1.0})
    killed = json.loads(first.observations()[0])
    assert killed["returncode"] == 124
    assert killed["output"] == ("before\n\n[cooperbench] command killed after 1s. Re-run it in a form that terminates.")
    assert "none" in first.observations()[1]


def test_a_command_that_would_lose_a_message_is_refused_whole(play):
    lossy = "send_message agent2 <<'MSG'\nfirst\nMSG\nsend_message agent2 \"second\"\ntouch ran"
    residue = 'touch ran; send_message agent2 "x"; touch ran'
    half = 'send_message agent2 "half a character \ud800"'  # no tokenizer reads it: it would void the peer's run
    first = Script([lossy, residue, 'send_message agent9 "x"', 'send_message agent2 "kept" && touch other', "ls", half, SUBMIT])
    second = Script([until(lambda: len(first.seen) > 6, "true")])
    run = play(first, second)
    seen = first.observations()
    assert "could not parse that call, so nothing was sent" in seen[0] and '"returncode": 1' in seen[0]
    assert "could not parse that call, so nothing was sent" in seen[1]
    assert "there is no colleague \\u0027agent9\\u0027" in seen[2]
    assert "ran" not in json.loads(seen[4])["output"] and "other" in json.loads(seen[4])["output"]
    assert "not valid Unicode, so nothing was sent" in seen[5]
    assert run.agents[0].sent_messages == 1
    delivered = [m["content"] for m in second.seen[-1] if m["content"].startswith("[Message from")]
    assert delivered == ["[Message from agent1]: kept"]


def test_a_hook_planted_in_the_shared_repository_does_not_run(play):
    plant = (
        "cd /git/*/repo.git; for hook in pre-receive update post-receive post-update reference-transaction; do "
        "printf '#!/bin/sh\\ntouch %s/owned\\n' $PWD > hooks/$hook && chmod +x hooks/$hook; done; "
        "mv hooks old; git config core.hooksPath $PWD/mine; printf '[core]\\n hooksPath = mine\\n' >> config; "
        "mkdir -p mine; cp hooks/* mine/ 2>/dev/null; printf '#!/bin/sh\\ntouch %s/owned\\n' $PWD > mine/pre-receive; "
        "chmod +x mine/pre-receive; ls hooks; cat config"
    )
    second = Script([])
    first = Script([plant, "echo one > one.txt", PR])
    second._steps = iter([until(lambda: len(first.seen) > 2, "echo two > two.txt"), PR, "ls /git/*/repo.git", SUBMIT])
    run = play(first, second)
    assert "Read-only file system" in first.observations()[0]
    assert "hooksPath = mine" not in first.observations()[0]
    assert "refs" in second.observations()[-1] and "owned" not in second.observations()[-1]
    assert "two.txt" in run.agents[1].patch and run.agents[0].patch == ONE


def test_what_an_agent_does_to_its_own_clone_does_not_change_its_submission(play, tmp_path):
    spoil = "git config diff.noprefix true; git config color.ui always; git remote set-url origin /nowhere; rm -rf .git"
    take_back = Script(["echo two > two.txt", PR, "git push -q origin :agent2"])
    run = play(Script(["echo one > one.txt", PR, spoil, SUBMIT]), take_back, keep=True)
    assert run.agents[0].patch == ONE and run.agents[0].opened_pr
    assert run.agents[1].patch == "" and run.agents[1].opened_pr
    assert len(list((tmp_path / "work").glob("pair-*/git/repo.git/refs"))) == 1  # keep=True


def test_binary_files_and_other_encodings_are_part_of_a_submission(play):
    write = "printf '\\x00\\x01\\xff' > logo.bin; printf 'caf\\xe9\\n' > latin.txt"
    run = play(Script([write, PR]), Script(["echo two > two.txt", "git add -A && git commit -qm w && git push -q"]))
    patch = run.agents[0].patch
    assert "GIT binary patch" in patch and "Binary files" not in patch and "+caf\udce9\n" in patch
    assert "two.txt" in run.agents[1].patch


def test_compaction_is_the_contracts(play):
    steps = ["echo a", "echo b", "echo c", "echo d"]
    summary = {"role": "assistant", "content": "the summary"}
    first = Script([*steps[:3], summary, *steps[3:]], prompt_tokens=500)
    play(first, Script([]), contract={"compaction": True, "compaction_trigger": 500, "step_limit": 4})
    assert first.kinds == ["policy", "policy", "policy", "summarizer", "policy"]
    assert [m["role"] for m in first.seen[3]] == ["user"] and "BEGIN TRANSCRIPT" in first.seen[3][0]["content"]
    assert first.seen[4][2]["content"] == "the summary"


def test_without_messages_and_remote_the_prompt_says_so_and_submissions_still_work(play):
    first = Script(["send_message agent2 hello", "git fetch -q; git branch -r", "echo one > one.txt", PR])
    run = play(first, Script(["echo two > two.txt", PR]), contract={"messaging": False, "git": False})
    assert "## Messaging" not in first.seen[0][1]["content"] and "Shared Git Remote" not in first.seen[0][1]["content"]
    assert "send_message: command not found" in first.observations()[0]  # no tripwire: there is no such command
    assert "agent2" not in json.loads(first.observations()[1])["output"]
    assert run.agents[0].patch == ONE and "two.txt" in run.agents[1].patch


def test_brief_goes_into_the_system_message_of_its_agent_alone(play):
    first, second = Script([]), Script([])
    play(first, second, brief_texts={"agent1": "peer: {{ task }} {% raw"})
    system = second.seen[0][0]["content"]
    assert system.startswith("You are a software engineer") and "peer:" not in str(second.seen[0])
    assert first.seen[0][0] == {"role": "system", "content": system + "\n\npeer: {{ task }} {% raw"}
    assert "peer:" not in first.seen[0][1]["content"] and "Linux sandbox 1 x86_64" in first.seen[0][1]["content"]


def test_two_pairs_at_once_do_not_mix(prepared, pair, tmp_path):
    def scripts(name):
        first = Script([f"send_message agent2 'from {name}'", f"echo {name} > {name}.txt", PR])
        second = Script([until(lambda: len(first.seen) > 3, "gh pr diff agent1")])
        return {"agent1": first, "agent2": second}

    pairs = {name: scripts(name) for name in ("left", "right")}

    async def go():
        with ThreadPoolExecutor(4) as executor:
            runs = [
                run_pair(
                    pair,
                    prepared,
                    sessions,
                    EvalContract(step_limit=9),
                    work_dir=tmp_path,
                    loop=asyncio.get_running_loop(),
                    executor=executor,
                    episode_id="the same id",
                )
                for sessions in pairs.values()
            ]
            return dict(zip(pairs, await asyncio.gather(*runs), strict=True))

    runs = asyncio.run(go())
    for name, run in runs.items():
        messages = re.findall(r"\[Message from agent1\]: (from \w+)", str(pairs[name]["agent2"].seen[-1]))
        assert messages == [f"from {name}"]
        assert f"{name}.txt" in run.agents[0].patch and f"+{name}" in pairs[name]["agent2"].observations()[-1]
    assert list(tmp_path.iterdir()) == []


def test_gold_patches_through_the_whole_pair_earn_the_reward(play, pair, prepared):
    def solve(feature: int) -> Script:
        patch = (pair.task_dir / f"feature{feature}" / "feature.patch").read_text()
        return Script([f"git apply <<'EOF'\n{patch}EOF", PR, "python -m pytest -q -p no:cacheprovider", SUBMIT])

    scripts = solve(1), solve(2)
    run = play(*scripts)
    assert " passed" in scripts[0].observations()[2]
    grade = grade_pair(pair, prepared, *(agent.patch for agent in run.agents))
    assert (grade.merge, grade.reward) == ("clean", 1.0)


def test_a_real_session_records_what_the_harness_asked(play):
    engine = ScriptedEngine(["no call", "echo one > one.txt", PR, SUBMIT])
    contract = {"max_tokens": 1000, "context_length": 60_000, "step_limit": 9}
    sessions = [engine.gateway(EvalContract(**contract)).session("e", a) for a in ("agent1", "agent2")]
    run = play(*sessions, contract=contract)
    assert run.agents[0].patch == ONE and run.agents[0].steps == 4
    turns = sessions[0].records()
    assert [t.kind for t in turns] == ["malformed", "policy", "policy", "policy"]
    assert [t.branch for t in turns] == [0, 1, 1, 1]  # the refused reply is dropped from the history: a fork
    assert bytes(turns[2].response_ids.tolist()).decode() == PR
