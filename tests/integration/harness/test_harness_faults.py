"""What ends a pair: a fault of either agent stops both within seconds, is named, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_pair import PR, Script, until

from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.episode import run_episode
from verl_opsd.cooperbench.harness import run_pair
from verl_opsd.cooperbench.messages import process_store
from verl_opsd.cooperbench.quarantine import Quarantine
from verl_opsd.cooperbench.sandbox import BubblewrapSandbox
from verl_opsd.errors import InfraFault, OpsdError

ENGINE = InfraFault("engine_died", "turn 2", "an engine answers", "restart it")


async def never():
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    "peer_does", [never, "sleep 60", 'send_message --wait agent1 "x"'], ids=["model call", "command", "waiting"]
)
def test_engine_fault_stops_the_peer_whatever_it_does(play, pair, peer_does):
    raised = []

    async def dies():
        await asyncio.sleep(0.5)  # the peer has started what it does
        raised.append(time.monotonic())
        return ENGINE

    second = Script([peer_does])
    with pytest.raises(InfraFault) as caught:
        play(Script([until(lambda: bool(second.seen), dies)]), second)
    assert time.monotonic() - raised[0] < 20  # 1 s on an idle machine; what the peer does takes 60
    assert caught.value.kind == "engine_died" and pair.key in str(caught.value) and "turn 2" in str(caught.value)
    assert caught.value.__cause__ is ENGINE
    assert len(second.seen) <= 2


def test_an_unexpected_error_is_a_harness_bug_with_its_cause(play):
    error = KeyError("surprise")
    with pytest.raises(InfraFault) as caught:
        play(Script([error]), Script([]))
    assert caught.value.kind == "harness_bug" and "surprise" in str(caught.value) and caught.value.__cause__ is error


def test_a_message_store_that_dies_is_no_fault_of_the_agent(play):
    async def kill_store():
        process_store().close()
        return "true"

    with pytest.raises(InfraFault) as caught:
        play(Script(["true", kill_store]), Script(["sleep 60"]))
    assert caught.value.kind == "message_store"


def test_sandbox_killed_during_a_command(play):
    def children(pid: int) -> set[int]:
        found = set()
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found |= {child, *children(child)}
        return found

    async def kill_later():
        async def kill():
            await asyncio.sleep(1.0)
            for pid in children(os.getpid()):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "bwrap":
                    os.kill(pid, signal.SIGKILL)

        kill_later.task = asyncio.create_task(kill())
        return "sleep 60"

    started = time.monotonic()
    with pytest.raises(InfraFault) as caught:
        play(Script(["echo one > one.txt", PR, kill_later]), Script([never]))
    assert caught.value.kind == "sandbox_died"
    assert time.monotonic() - started < 40


def test_sandbox_gone_between_commands_is_not_an_empty_patch(play, monkeypatch):
    made = []
    init = BubblewrapSandbox.__init__
    monkeypatch.setattr(BubblewrapSandbox, "__init__", lambda self, spec: (made.append(self), init(self, spec))[1])

    async def close_remote():
        next(s for s in made if s.spec.name.endswith("-remote")).close()
        return "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

    with pytest.raises(InfraFault) as caught:
        play(Script(["echo one > one.txt", PR, close_remote]), Script([never]))
    assert caught.value.kind == "sandbox_died"


def test_a_remote_that_cannot_be_read_is_not_an_empty_patch(play):
    first = Script(["echo one > one.txt", PR, "find /git/*/repo.git/objects -type f -delete", "true"])
    with pytest.raises(InfraFault) as caught:
        play(first, Script([never]))
    assert caught.value.kind == "patch_unreadable"


def test_a_tripwire_voids_the_run(play):
    script = "printf 'send_'> x; echo 'message agent2 hi' >> x; bash x"  # hidden from the harness, so bash runs it
    with pytest.raises(InfraFault) as caught:
        play(Script([script]), Script([never]))
    assert caught.value.kind == "tripwire:send_message_missing"


def test_a_fault_that_comes_back_is_quarantined(prepared, pair, tmp_path):
    """The same tripwire twice; the third time no agent plays, and another pair does."""
    broken = "echo 'bash: line {}: gh: command not found'"
    no_grading = SimpleNamespace()  # a pair that ends by a fault has nothing to grade

    async def go(n, of):
        sessions = {"agent1": Script([broken.format(n), "true"]), "agent2": Script(["true"] * 20)}
        for script in sessions.values():
            script.records = lambda: ()
        with ThreadPoolExecutor(2) as executor:
            options = {"episode_id": f"e{n}", "work_dir": tmp_path / "work", "agents": executor, "grading": no_grading}
            contract = EvalContract(step_limit=20, command_timeout_s=30.0, wall_limit_s=60.0)
            episode, _ = await run_episode(of, prepared, sessions, contract, quarantine=Quarantine(tmp_path), **options)
        return episode.outcome, any(script.seen for script in sessions.values())

    other = dataclasses.replace(pair, features=(1, 3))
    found = [asyncio.run(go(n, of)) for n, of in enumerate((pair, pair, pair, other))]
    tripwire = ("infra:tripwire:gh_missing", True)
    assert found == [tripwire, tripwire, ("infra:quarantined", False), tripwire]


def test_cancelling_the_caller_stops_both_agents(prepared, pair, tmp_path):
    sessions = {"agent1": Script(["sleep 60"]), "agent2": Script([never])}

    async def go():
        with ThreadPoolExecutor(2) as executor:
            task = asyncio.create_task(
                run_pair(
                    pair,
                    prepared,
                    sessions,
                    EvalContract(),
                    work_dir=tmp_path,
                    loop=asyncio.get_running_loop(),
                    executor=executor,
                    episode_id="e",
                )
            )
            while not sessions["agent1"].seen:
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.5)
            assert len(list(tmp_path.iterdir())) == 1
            started = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - started < 30  # the command takes 60

    asyncio.run(go())
    assert list(tmp_path.iterdir()) == []


def test_wrong_base_commit_is_found_before_an_agent_acts(play, prepared, monkeypatch):
    first = Script([])
    wrong = dataclasses.replace(prepared, base_sha="0" * 40)
    with pytest.raises(InfraFault) as caught:
        play(first, Script([]), prepared=wrong)
    assert caught.value.kind == "git_setup:head" and first.seen == []


def test_missing_toolchain_is_found_before_an_agent_acts(play, prepared, tmp_path):
    (tmp_path / "empty" / "bin").mkdir(parents=True)
    first = Script([])
    with pytest.raises(InfraFault) as caught:
        play(first, Script([]), prepared=dataclasses.replace(prepared, python_prefix=tmp_path / "empty"))
    assert caught.value.kind == "preflight:python" and first.seen == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pair": {"features": (2, 1)}}, "features (2, 1)"),
        ({"pair": {"task_id": 7}}, "task7"),
        ({"contract": {"sandbox": "docker"}}, "contract.sandbox='docker'"),
        ({"contract": {"command_timeout_s": 600.0}}, "command_timeout_s=600"),
        ({"contract": {"harness": "cooperbench==0.0.1"}}, "contract.harness='cooperbench==0.0.1'"),
        ({"brief_texts": {"agent3": "x"}}, "agent3"),
    ],
)
def test_contradicting_arguments_are_refused_before_anything_is_made(play, pair, tmp_path, changes, text):
    options = {k: v for k, v in changes.items() if k not in ("pair", "contract")}
    with pytest.raises(OpsdError) as caught:
        play(
            Script([]),
            Script([]),
            pair=dataclasses.replace(pair, **changes.get("pair", {})),
            contract=changes.get("contract"),
            **options,
        )
    assert not isinstance(caught.value, InfraFault) and text in str(caught.value)
    assert not (tmp_path / "work").exists()
