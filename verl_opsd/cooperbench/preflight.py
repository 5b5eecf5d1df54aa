"""Checks through an agent's own execute path, before its first turn: what is broken would look like a bad agent."""

from __future__ import annotations

import shlex

from verl_opsd.cooperbench.environment import SandboxEnvironment
from verl_opsd.errors import InfraFault

_TOOLCHAIN = r"""
[ "$(command -v python)" = "$TOOLCHAIN/python" ] && python -c 'import sys' && echo ok:python
git merge-tree --write-tree HEAD HEAD >/dev/null && echo ok:git
command -v gh >/dev/null && echo ok:gh
timeout 5 cat && echo ok:stdin
printf 'ok:bytes\xb3\xff\n'
"""
_TOOLCHAIN_NEEDS = {
    "python": ("ok:python", "python is the task's own (python_prefix) and starts"),
    "git": ("ok:git", "git is at least 2.38 (gh pr create checks for conflicts with merge-tree --write-tree)"),
    "gh": ("ok:gh", "the harness' gh is on PATH"),
    "stdin": ("ok:stdin", "standard input ends at once: a command that reads it must not hang"),
    "bytes": ("ok:bytes\ufffd\ufffd", "output that is not UTF-8 is replaced and does not end the run"),
}


def check_toolchain(env: SandboxEnvironment) -> None:
    """Runs one command that shows the toolchain.

    Raises:
        InfraFault: kind ``preflight:<python|git|gh|stdin|bytes>``.
    """
    output = env.execute({"command": f"TOOLCHAIN={shlex.quote(env.toolchain)}\n{_TOOLCHAIN}"})["output"]
    lines = output.splitlines()
    for name, (line, need) in _TOOLCHAIN_NEEDS.items():
        if line not in lines:
            raise InfraFault(
                f"preflight:{name}",
                f"{env.sandbox.spec.name}: no line {line!r} in {output[-1000:]!r}",
                f"in an agent's shell {need}",
                "correct the task's python_prefix and binds, or the sandbox",
            )


def check_git(env: SandboxEnvironment, agent_id: str, *, url: str, base_sha: str) -> None:
    """Asserts what the harness' git setup should have done.

    Raises:
        InfraFault: kind ``git_setup:<origin|head|commits|gh|branch|tracking|main>``.
    """
    facts = {
        "origin": ("git remote get-url origin", url),
        "head": ("git rev-parse HEAD", base_sha),
        "commits": ("git log --all --format=%H", base_sha),
        "gh": ("command -v gh", "/usr/local/bin/gh"),
        "branch": (f"git ls-remote origin refs/heads/{agent_id}", f"{base_sha}\trefs/heads/{agent_id}"),
        "tracking": ("git rev-parse refs/remotes/origin/main", base_sha),
        "main": ("git ls-remote origin refs/heads/main", f"{base_sha}\trefs/heads/main"),
    }
    script = "; ".join(f"echo {shlex.quote(name)}; {command} 2>&1; echo ----" for name, (command, _) in facts.items())
    output = env.execute({"command": script})["output"]
    found = dict(block.strip("\n").split("\n", 1) for block in output.split("----\n") if "\n" in block.strip("\n"))
    for name, (command, expected) in facts.items():
        if found.get(name, "").strip() != expected:
            raise InfraFault(
                f"git_setup:{name}",
                f"{env.sandbox.spec.name}: `{command}` gives {found.get(name, '')[:500]!r}, expected {expected!r}",
                "agents start from the one base commit, without upstream's history, and the pair's remote is origin",
                "prepare the task again; check that git works in the sandbox",
            )
