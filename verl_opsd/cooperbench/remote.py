"""The pair's git remote: bare repositories made inside a sandbox, and a clean clone that submissions are read from.

No git runs on the host in a directory that agents can write. A submission is read from the remote, not from the agent's
own clone: what the agent did to its clone, its git configuration or its sandbox changes nothing in what is graded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from cooperbench.agents._coop.runtime import normalize_patch
from cooperbench.agents.mini_swe_agent_v2.connectors import GitConnector

from verl_opsd.cooperbench.sandbox.base import Limits, Sandbox, SandboxSpec
from verl_opsd.errors import InfraFault

Bind = tuple[Path, str]

#: Seconds that one git command of the harness itself may take.
GIT_TIMEOUT_S = 120.0
PATCH_LIMITS = Limits(output_bytes=64 << 20)


class _Reader:
    """An environment in which a command that fails is a fault: the harness would read an error text as a patch.

    Diffs hold binary files too, and bytes that are not UTF-8 stand in the output as ``surrogateescape`` leaves them.
    """

    def __init__(self, sandbox: Sandbox, cwd: str):
        self.sandbox, self.cwd = sandbox, cwd

    def execute(self, action: dict[str, Any]) -> dict[str, Any]:
        # The harness' own diff says only that a binary file differs, and no tool can apply that.
        command = action["command"].replace("git --no-pager diff ", "git --no-pager diff --binary ")
        done = self.sandbox.run(["bash", "-c", command], timeout_s=GIT_TIMEOUT_S, cwd=self.cwd)
        if done.returncode != 0 or done.timed_out or done.truncated:
            raise InfraFault(
                "patch_unreadable",
                f"`{action['command']}` in {self.sandbox.spec.name}: return code {done.returncode}, "
                f"timed out: {done.timed_out}, cut: {done.truncated}: {done.text[-500:]!r}",
                "a submission that can't be read is not an empty submission",
                "run the pair again; when it repeats, look at the remote with keep=True",
            )
        return {"output": done.output.decode("utf-8", "surrogateescape"), "returncode": 0, "exception_info": ""}


class PairRemote:
    """Remote of one pair.

    Args:
        run_id: names the repository inside the sandboxes: ``/git/<run_id>/<repository>.git``.
        repositories: agent -> name of its repository; one shared name, or one each where agents don't share a remote.
        root: empty host directory, owned by this object.
        base: the pair's base repository, copied for the clean clone.
        open_sandbox: opens a sandbox for a specification.
    """

    def __init__(
        self,
        run_id: str,
        repositories: dict[str, str],
        *,
        root: Path,
        base: Path,
        open_sandbox: Callable[[SandboxSpec], Sandbox],
    ):
        self._inside, self._repositories = f"/git/{run_id}", repositories
        self._host = root / "git"
        names = sorted(set(repositories.values()))
        workspace = root / "reader"
        for name in names:
            (self._host / f"{name}.git").mkdir(parents=True)
        for agent in repositories:
            shutil.copytree(base, workspace / agent, symlinks=True)
        spec = SandboxSpec(
            name=f"{root.name}-remote",
            workspace=workspace,
            rw_binds=tuple((self._host / f"{n}.git", f"{self._inside}/{n}.git") for n in names),
            limits=PATCH_LIMITS,
        )
        self.sandbox = open_sandbox(spec)
        for name in names:
            path = f"{self._inside}/{name}.git"
            # Agents push with git and a user id of their own: nothing may run in the background or need a hook.
            self._run(
                "/",
                f"git init -q --bare --shared=group --template= --initial-branch=main {path} && mkdir {path}/hooks "
                f"&& git -C {path} config gc.auto 0 && git -C {path} config receive.autogc false",
            )
        for agent in repositories:
            self._run(f"/workspace/{agent}", f"git remote remove origin 2>/dev/null; git remote add origin {self.url(agent)}")

    def url(self, agent_id: str) -> str:
        """Remote URL for an agent, a path inside its sandbox."""
        return f"{self._inside}/{self._repositories[agent_id]}.git"

    def binds(self, agent_id: str) -> tuple[tuple[Bind, ...], tuple[Bind, ...]]:
        """(writable, read-only) binds for an agent's sandbox; the repository's hooks and settings are read-only."""
        host = self._host / f"{self._repositories[agent_id]}.git"
        url = self.url(agent_id)
        return ((host, url),), ((host / "hooks", f"{url}/hooks"), (host / "config", f"{url}/config"))

    def opened_pr(self, agent_id: str) -> bool:
        """Whether the agent's pull request is on the remote.

        Raises:
            InfraFault: the remote can't be read.
        """
        return bool(self._run(f"/workspace/{agent_id}", f"git ls-remote --tags origin refs/tags/pr/{agent_id}"))

    def patch(self, connector: GitConnector) -> str:
        """The agent's submission as the harness defines it: the diff of its pull request, or else of its pushed branch.

        Raises:
            InfraFault: kind ``patch_unreadable``; never an empty patch for a failure.
        """
        where = f"/workspace/{connector.agent_id}"
        if not self._run(where, f"git ls-remote --heads origin refs/heads/{connector.agent_id}"):
            return ""  # the agent took its branch back; with a pull request left, the harness would grade an error text
        # The harness ignores a fetch that fails, and would grade what was fetched before.
        self._run(where, "git fetch -q --prune --tags --force origin && git fetch -q --prune origin")
        return normalize_patch(connector.submitted_patch(cast(Any, _Reader(self.sandbox, where))))

    def published(self, connector: GitConnector) -> bool:
        """Whether peers find on the remote what will be graded.

        Raises:
            InfraFault: kind ``patch_unreadable``.
        """
        return self.opened_pr(connector.agent_id) or bool(self.patch(connector))

    def _run(self, cwd: str, command: str) -> str:
        return _Reader(self.sandbox, cwd).execute({"command": command})["output"].strip()
