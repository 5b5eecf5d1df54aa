"""The harness' agent, with those of its faults closed that would change what is recorded or graded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cooperbench.agents.mini_swe_agent_v2.agents.default import DefaultAgent
from cooperbench.agents.mini_swe_agent_v2.exceptions import InterruptAgentFlow

from verl_opsd.cooperbench.environment import SandboxEnvironment, has_half_characters
from verl_opsd.cooperbench.history import join_segments
from verl_opsd.cooperbench.sends import Sends, account
from verl_opsd.cooperbench.stopping import RunGuard, WallLimitReached
from verl_opsd.errors import InfraFault
from verl_opsd.tokens.gateway import ContextOverflow

#: A call that the harness' parse guard refuses: how its own refusal text is obtained.
_REFUSED = "send_message"


class PairAgent(DefaultAgent):
    """One agent of a pair.

    Args:
        guard: stop signal and wall-clock limit.
        opened_pr: whether this agent's pull request is on the remote.
        published: whether the remote holds what will be graded for this agent.

    Attributes:
        send_occurrences, sends_handled, sends_rejected: `send_message` calls seen, handled one by one (delivered, or
            answered that they were not), and refused with their whole command. The first is the sum of the others.
    """

    env: SandboxEnvironment

    def __init__(
        self, *args: Any, guard: RunGuard, opened_pr: Callable[[], bool], published: Callable[[], bool], **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self._guard, self._remote_pr, self._remote_published = guard, opened_pr, published
        self._nudging = False
        self.send_occurrences = self.sends_handled = self.sends_rejected = 0

    def query(self) -> dict[str, Any]:
        """One model call within the limits; `WallLimit` and `ContextOverflow` end the run as outcomes of the policy.

        Raises:
            PairStopped: the other agent hit a fault.
            InfraFault: the engine failed.
        """
        try:
            self._guard.check()
            return super().query()
        except WallLimitReached:
            raise _ended("WallLimit") from None
        except ContextOverflow as overflow:
            raise _ended("ContextOverflow", str(overflow)) from overflow

    def execute_actions(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Runs a message's actions. A command that would lose a `send_message` is not run but answered with the
        harness' own refusal; the harness would send a part of it and say nothing of the rest.

        Raises:
            InfraFault: kind ``message_lost``, a call was neither handled nor refused; or the sandbox's own kinds.
        """
        if not self.comm:
            return super().execute_actions(message)
        extra = message["extra"]
        actions = [self._accounted(action) for action in extra["actions"]]
        handled = self.sends_handled
        observations = super().execute_actions({**message, "extra": {**extra, "actions": [a for a, _ in actions]}})
        occurrences = sum(s.occurrences for _, s in actions)
        rejected = sum(s.occurrences for _, s in actions if s.rejected)
        self.send_occurrences += occurrences
        self.sends_rejected += rejected
        if self.sends_handled - handled + rejected != occurrences:
            raise InfraFault(
                "message_lost",
                f"{self.agent_id}: {occurrences} send_message calls, {self.sends_handled - handled} handled, "
                f"{rejected} refused in {extra['actions']!r}",
                "every send_message call is delivered or refused",
                "extend verl_opsd.cooperbench.sends to the form of this command",
            )
        return observations

    def history(self) -> list[dict[str, Any]]:
        """All messages of the run, those that compaction has replaced too."""
        if not self._compaction_count:
            return list(self.messages)
        return join_segments([*self._segments, {"kind": "solver", "messages": self.messages}])

    def _accounted(self, action: dict[str, Any]) -> tuple[dict[str, Any], Sends]:
        if action["tool_name"] == "send_message":
            return action, Sends(occurrences=1, rejected=False, residue="")
        sends = account(action["command"])
        if sends.occurrences and not sends.rejected and sends.residue.strip():
            # Taking a call out of `a; send_message ...; b` leaves `a; ; b`, which the shell refuses as a whole.
            syntax = self.env.sandbox.run(["bash", "-n", "-c", "--", sends.residue], timeout_s=self.env.timeout_s)
            sends = Sends(sends.occurrences, syntax.returncode != 0, sends.residue)
        return ({**action, "command": _REFUSED} if sends.rejected else action), sends

    def _handle_send_message(self, action: dict[str, Any]) -> dict[str, Any]:
        # The harness queues a message for any name, and says "sent" for one that nobody will read.
        self.sends_handled += 1
        assert self.comm is not None
        peers = [a for a in self.comm.agents if a != self.agent_id]
        recipient = action.get("recipient", "")
        if recipient not in peers:
            output = f"send_message: there is no colleague {recipient!r}, so nothing was sent. Write to: {', '.join(peers)}"
            return {"output": output, "returncode": 1, "exception_info": ""}
        if has_half_characters(action.get("content", "")):
            output = "send_message: the message is not valid Unicode, so nothing was sent."
            return {"output": output, "returncode": 1, "exception_info": ""}
        return super()._handle_send_message(action)

    def _nudge_unsubmitted(self) -> bool:
        # A nudge after a limit can't help: the next model call runs into the same limit.
        if self.messages[-1]["extra"].get("exit_status") != "Submitted":
            return False
        self._nudging = True
        try:
            return super()._nudge_unsubmitted()
        finally:
            self._nudging = False

    def _opened_pr(self) -> bool:
        # The harness asks this for the nudge (is there a pull request?) and for what it tells the peer at the end,
        # where a pushed branch without a pull request is graded as well.
        return self._remote_pr() if self._nudging else self._remote_published()


def _ended(status: str, detail: str = "") -> InterruptAgentFlow:
    extra = {"exit_status": status, "submission": "", "detail": detail}
    return InterruptAgentFlow({"role": "exit", "content": status, "extra": extra})
