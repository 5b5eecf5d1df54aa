"""The environment over a sandbox that answers as told: what the harness and the model get to see."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from cooperbench.agents.mini_swe_agent_v2.exceptions import Submitted

from verl_opsd.cooperbench.environment import MAX_COMMAND_BYTES, SandboxEnvironment
from verl_opsd.cooperbench.preflight import check_git, check_toolchain
from verl_opsd.cooperbench.sandbox.base import CommandResult
from verl_opsd.errors import InfraFault

MARK = b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class FakeSandbox:
    spec = SimpleNamespace(name="fake")

    def __init__(self, output=b"", returncode=0, timed_out=False, truncated=False, error=None):
        self.result, self.error = CommandResult(returncode, output, timed_out, truncated, 0.1), error
        self.ran, self.closed = [], False

    def run(self, argv, *, timeout_s, cwd="/workspace/repo", env=None, stdin=None):
        self.ran.append((list(argv), timeout_s, cwd))
        if self.error:
            raise self.error
        return self.result

    def close(self):
        self.closed = True


def environment(**result):
    return SandboxEnvironment(FakeSandbox(**result), timeout_s=9.0, toolchain="/venv/bin")


def test_runs_in_a_login_shell_with_the_limit_and_the_directory():
    env = environment(output=b"hi\n")
    assert env.execute({"command": "echo hi"}) == {"output": "hi\n", "returncode": 0, "exception_info": ""}
    env.execute({"command": "ls"}, cwd="/tmp", timeout=3)
    (argv, limit, cwd), (_, limit2, cwd2) = env.sandbox.ran
    assert argv[:2] == ["bash", "-lc"] and argv[-2:] == ["/venv/bin", "echo hi"]
    assert (limit, cwd, limit2, cwd2) == (9.0, "/workspace/repo", 3, "/tmp")


@pytest.mark.parametrize("output", [MARK, MARK + b"\nnotes\n", b"\n  " + MARK + b"  \n"])
def test_the_end_mark_on_the_first_line_submits(output):
    with pytest.raises(Submitted) as ended:
        environment(output=output).execute({"command": "x"})
    assert ended.value.messages[0]["extra"]["exit_status"] == "Submitted"


@pytest.mark.parametrize(
    "result", [{"output": b"first\n" + MARK}, {"output": MARK, "returncode": 1}, {"output": MARK + b" now"}]
)
def test_anything_else_does_not_submit(result):
    assert environment(**result).execute({"command": "x"})["returncode"] == result.get("returncode", 0)


def test_a_dead_sandbox_escapes_as_a_fault():
    fault = InfraFault("sandbox_died", "a", "b", "c")
    with pytest.raises(InfraFault) as caught:
        environment(error=fault).execute({"command": "x"})
    assert caught.value is fault


def test_limits_and_bytes_are_told():
    assert environment(output=b"\xb3a\xff").execute({"command": "x"})["output"] == "\ufffda\ufffd"
    killed = environment(output=b"part", returncode=124, timed_out=True).execute({"command": "x"})["output"]
    assert killed == "part\n[cooperbench] command killed after 9s. Re-run it in a form that terminates."
    assert environment(returncode=124).execute({"command": "timeout 1 x"})["output"] == ""  # the agent's own `timeout`
    cut = environment(output=b"abcd", truncated=True).execute({"command": "x"})["output"]
    assert cut == "abcd\n[cooperbench] output cut after 4 bytes."


@pytest.mark.parametrize("command", ["a\0b", "\ud83d", "x" * MAX_COMMAND_BYTES, "é" * (MAX_COMMAND_BYTES // 2 + 1)])
def test_commands_that_no_system_can_start_are_answered_not_run(command):
    env = environment()
    result = env.execute({"command": command})
    assert result["returncode"] == -1 and result["exception_info"] and env.sandbox.ran == []


def test_longest_command_runs():
    env = environment()
    env.execute({"command": "x" * (MAX_COMMAND_BYTES - 1)})
    assert len(env.sandbox.ran) == 1


def test_tripwires_are_remembered_and_life_is_shown():
    beats = []
    env = SandboxEnvironment(
        FakeSandbox(output=b"bash: line 1: gh: command not found"),
        timeout_s=1,
        toolchain="/",
        before_command=lambda: beats.append(1),
    )
    env.execute({"command": "gh"})
    assert env.tripwires == {"gh_missing"} and beats == [1]


def test_prompt_variables_do_not_name_this_host():
    variables = environment().get_template_vars()
    assert {k: variables[k] for k in ("system", "release", "version", "machine")} == {
        "system": "Linux",
        "release": "sandbox",
        "version": "1",
        "machine": "x86_64",
    }


GOOD = "ok:python\nok:git\nok:gh\nok:stdin\nok:bytes\ufffd\ufffd\n"


def test_preflight_passes_when_every_line_is_there():
    env = environment(output=b"ok:python\nok:git\nok:gh\nok:stdin\nok:bytes\xb3\xff\n")
    check_toolchain(env)


@pytest.mark.parametrize("missing", ["python", "git", "gh", "stdin", "bytes"])
def test_preflight_names_what_is_missing(missing):
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"ok:{missing}")]
    with pytest.raises(InfraFault) as caught:
        check_toolchain(environment(output="\n".join(lines).encode()))
    assert caught.value.kind == f"preflight:{missing}"


def git_output(**changes):
    facts = {
        "origin": "/git/1/repo.git",
        "head": "abc",
        "commits": "abc",
        "gh": "/usr/local/bin/gh",
        "branch": "abc\trefs/heads/agent1",
        "tracking": "abc",
        "main": "abc\trefs/heads/main",
    } | changes
    return "".join(f"{k}\n{v}\n----\n" for k, v in facts.items()).encode()


def test_git_check():
    check_git(environment(output=git_output()), "agent1", url="/git/1/repo.git", base_sha="abc")


@pytest.mark.parametrize(
    "change",
    [
        {"origin": "https://github.com/x/y"},
        {"head": "def"},
        {"commits": "abc\ndef"},
        {"gh": "/usr/bin/gh"},
        {"branch": ""},
        {"tracking": "fatal: ambiguous argument"},
        {"main": "def\trefs/heads/main"},
    ],
)
def test_git_check_names_what_differs(change):
    with pytest.raises(InfraFault) as caught:
        check_git(environment(output=git_output(**change)), "agent1", url="/git/1/repo.git", base_sha="abc")
    assert caught.value.kind == f"git_setup:{next(iter(change))}"
