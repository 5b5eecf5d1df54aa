"""What one pair has on this host (directory, remote, a sandbox and a mailbox for each agent), and one agent's run."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cooperbench.agents.mini_swe_agent_v2.connectors import GitConnector
from cooperbench.agents.mini_swe_agent_v2.connectors.messaging import MessagingConnector

from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.agent import PairAgent
from verl_opsd.cooperbench.environment import SandboxEnvironment
from verl_opsd.cooperbench.identity import coop_config
from verl_opsd.cooperbench.messages import process_store
from verl_opsd.cooperbench.model import GatewayModel
from verl_opsd.cooperbench.preflight import check_git, check_toolchain
from verl_opsd.cooperbench.remote import GIT_TIMEOUT_S, PairRemote
from verl_opsd.cooperbench.sandbox import make_sandbox
from verl_opsd.cooperbench.sandbox.base import Sandbox, SandboxSpec
from verl_opsd.cooperbench.stopping import PairStopped, RunGuard, StopSignal
from verl_opsd.cooperbench.types import ChatSession, PairTask, PreparedTask
from verl_opsd.errors import InfraFault
from verl_opsd.tokens.records import AgentOutcome
from verl_opsd.trees import remove_tree

SHARED_REPOSITORY = "repo"


@dataclass(frozen=True)
class _AgentPlace:
    sandbox: Sandbox
    connector: GitConnector
    mailbox: MessagingConnector | None


class PairPlace:
    """Opened, used and closed once. Methods block; each agent's may run on a thread of its own.

    Args:
        agents: agent ids, in the order of the pair's features.
        work_dir: parent of the pair's directory.
        episode_id: the repository's path inside the sandboxes is derived from it, so a replay reads the same prompts.
        backend, allow_unsafe: as for ``make_sandbox``.
    """

    def __init__(
        self,
        pair: PairTask,
        prepared: PreparedTask,
        contract: EvalContract,
        agents: Sequence[str],
        work_dir: Path,
        episode_id: str,
        backend: str,
        allow_unsafe: bool,
    ):
        self.pair, self.prepared, self.contract, self.agents = pair, prepared, contract, tuple(agents)
        self._backend, self._allow_unsafe = backend, allow_unsafe
        self._repository_id = hashlib.sha256(episode_id.encode()).hexdigest()[:8]
        self._run_id = uuid.uuid4().hex[:12]
        self.root = work_dir / f"pair-{self._run_id}"
        self._config = coop_config()
        self._lock, self._setup = threading.Lock(), threading.Lock()
        self._stopped = False
        self._sandboxes: list[Sandbox] = []
        self._places: dict[str, _AgentPlace] = {}
        self._remote: PairRemote | None = None

    @property
    def remote(self) -> PairRemote:
        """The pair's remote, once open."""
        if self._remote is None:
            raise AssertionError("open() comes first")
        return self._remote

    def open(self) -> None:
        """Makes the directory and the remote.

        Raises:
            InfraFault: a sandbox or a git command failed.
        """
        self.root.mkdir(parents=True)
        self._remote = PairRemote(
            self._repository_id,
            {a: SHARED_REPOSITORY if self.contract.git else a for a in self.agents},
            root=self.root,
            base=self.prepared.base,
            open_sandbox=self._open_sandbox,
        )

    def open_agent(self, agent_id: str) -> None:
        """Makes an agent's workspace and sandbox, connects it to remote and messages, and checks both.

        Raises:
            InfraFault: ``git_setup:<what>``, ``preflight:<what>``, or the sandbox's own kinds.
        """
        home = self.root / agent_id
        shutil.copytree(self.prepared.base, home / "workspace" / "repo", symlinks=True)
        writable, read_only = self.remote.binds(agent_id)
        toolchain = self.prepared.python_prefix
        spec = SandboxSpec(
            name=f"{self.root.name}-{agent_id}",
            workspace=home / "workspace",
            ro_binds=(*self.prepared.ro_binds, (toolchain, str(toolchain)), *read_only),
            rw_binds=writable,
            env={**self._config["environment"]["env"], **self.prepared.env},
            hidden=(self.pair.dataset_dir,),
        )
        sandbox = self._open_sandbox(spec)
        env = SandboxEnvironment(sandbox, timeout_s=GIT_TIMEOUT_S, toolchain=f"{toolchain}/bin")
        connector = GitConnector(agent_id, list(self.agents), self.remote.url(agent_id))
        try:
            with self._setup:  # both push `main`: at the same time one of the two is left without origin/main
                connector.setup(cast(Any, env))
        except RuntimeError as error:
            raise InfraFault(
                "git_setup:connector",
                f"{agent_id}: {error}",
                "an agent starts with a working remote and a gh that opens pull requests",
                "check that git works in the sandbox and that /usr/local/bin is writable there",
            ) from error
        check_git(env, agent_id, url=self.remote.url(agent_id), base_sha=self.prepared.base_sha)
        check_toolchain(env)
        mailbox = process_store().connect(agent_id, self.agents, self._run_id) if self.contract.messaging else None
        with self._lock:
            self._places[agent_id] = _AgentPlace(sandbox, connector, mailbox)

    def run_agent(
        self, agent_id: str, session: ChatSession, loop: asyncio.AbstractEventLoop, stop: StopSignal, brief: str
    ) -> tuple[AgentOutcome, list[dict[str, Any]]]:
        """Runs one agent to its end and reads its submission.

        Raises:
            InfraFault: of engine, sandbox or remote, or ``tripwire:<name>``.
            PairStopped: the other agent failed.
        """
        place, contract = self._places[agent_id], self.contract
        heartbeat = place.mailbox.heartbeat if place.mailbox else lambda: None
        guard = RunGuard(stop, contract.wall_limit_s, heartbeat)
        env = SandboxEnvironment(
            place.sandbox,
            timeout_s=contract.command_timeout_s,
            toolchain=f"{self.prepared.python_prefix}/bin",
            before_command=heartbeat,
        )
        settings = dict(self._config["agent"])
        if brief:
            settings["system_template"] = settings["system_template"].rstrip("\n") + "\n\n{{ actor_brief }}"
        settings |= {
            "step_limit": contract.step_limit,
            "cost_limit": 0.0,  # the model runs here and costs nothing; 0 is off
            "compaction_enabled": contract.compaction,
            "compaction_token_trigger": contract.compaction_trigger,
        }
        model = GatewayModel(session, loop=loop, guard=guard, templates=self._config["model"])
        agent = PairAgent(
            model,
            env,
            comm=place.mailbox,
            agent_id=agent_id,
            guard=guard,
            opened_pr=lambda: self.remote.opened_pr(agent_id),
            published=lambda: self.remote.published(place.connector),
            **settings,
        )
        agent.extra_template_vars |= {
            "agent_id": agent_id,
            "agents": list(self.agents),
            "git_enabled": contract.git,
            "messaging_enabled": contract.messaging,
            "actor_brief": brief,
        }
        feature = self.pair.features[self.agents.index(agent_id)]
        ended = agent.run(task=self.pair.feature_text(feature))
        self._check_tripwires(agent_id, env.tripwires)
        outcome = AgentOutcome(
            agent_id=agent_id,
            feature_id=feature,
            status=ended["exit_status"],
            steps=agent.n_calls,
            patch=self.remote.patch(place.connector),
            sent_messages=len(agent.sent_messages),
            opened_pr=self.remote.opened_pr(agent_id),
            error=ended.get("detail") or None,
            prompt_tokens=model.prompt_tokens,
            completion_tokens=model.completion_tokens,
        )
        return outcome, agent.history()

    def _check_tripwires(self, agent_id: str, seen: set[str]) -> None:
        if not self.contract.messaging:
            seen = seen - {"send_message_missing"}  # without messaging there is no such command
        for name in sorted(seen):
            raise InfraFault(
                f"tripwire:{name}",
                f"{agent_id} saw an error that only a broken harness gives",
                "a run in which gh, the remote or send_message was missing measures the harness, not the agent",
                "run the preflight, and look at the observations of this run",
            )

    def _open_sandbox(self, spec: SandboxSpec) -> Sandbox:
        sandbox = make_sandbox(self._backend, spec, allow_unsafe=self._allow_unsafe)
        with self._lock:
            self._sandboxes.append(sandbox)
            stopped = self._stopped
        if stopped:
            raise PairStopped
        return sandbox

    def stop(self) -> None:
        """Ends whatever agents wait for: their commands, and their waiting for one another's messages. Idempotent."""
        with self._lock:
            self._stopped = True
            sandboxes, places = list(self._sandboxes), list(self._places.values())
        for place in places:
            if place.mailbox:
                place.mailbox.mark_exited()
        for sandbox in sandboxes:
            sandbox.close()

    def close(self, keep: bool) -> None:
        """Removes everything of the pair; only the directory stays if ``keep``. No agent may be running.

        Raises:
            InfraFault: kind ``cleanup``, something is left.
        """
        self.stop()
        mailboxes = [p.mailbox for p in self._places.values() if p.mailbox]
        if mailboxes:
            process_store().forget(self._run_id, mailboxes)
        if keep or not self.root.exists():
            return
        with contextlib.suppress(OSError):  # the fault below names what is left
            remove_tree(self.root)
        if self.root.exists() or (mailboxes and process_store().keys(self._run_id)):
            raise InfraFault(
                "cleanup",
                f"{self.root} or the pair's messages are still there after they were removed",
                "a pair leaves nothing behind",
                "remove the directory by hand and look for processes that still write to it",
            )
