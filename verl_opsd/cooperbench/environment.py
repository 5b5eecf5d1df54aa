"""The harness' environment over one sandbox: a shell command in, its output and return code out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from cooperbench.agents.mini_swe_agent_v2.environments.docker import DockerEnvironment

from verl_opsd.cooperbench.sandbox.base import CommandResult, Sandbox
from verl_opsd.cooperbench.stopping import tripwires_in

REPO = "/workspace/repo"

#: Rendered into every prompt, so it must not depend on the host.
SYSTEM_INFORMATION = {"system": "Linux", "release": "sandbox", "version": "1", "machine": "x86_64"}

#: Linux refuses a longer single argument (MAX_ARG_STRLEN, bytes, its end mark included).
MAX_COMMAND_BYTES = 131_071

# The login shell resets PATH (Debian's /etc/profile), so the task's toolchain is put in front of it afterwards. The
# command runs in a shell of its own: its error messages are those of a plain `bash -c`.
_LOGIN_SHELL = 'export PATH="$1:$PATH"; exec bash -c -- "$2"'


class SandboxEnvironment:
    """Environment protocol of the harness over a :class:`Sandbox`.

    Args:
        sandbox: where commands run; owned by the caller unless :meth:`cleanup` is called.
        timeout_s: seconds that one command may run.
        toolchain: directory inside the sandbox that leads PATH.
        before_command: called before each command (the agent's sign of life).

    Attributes:
        tripwires: names of the tripwires that outputs have set off so far.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        timeout_s: float,
        toolchain: str,
        before_command: Callable[[], None] = lambda: None,
    ):
        self.sandbox, self.toolchain, self.before_command = sandbox, toolchain, before_command
        self.timeout_s = timeout_s
        self.config = {"cwd": REPO, "timeout_s": timeout_s}
        self.tripwires: set[str] = set()

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Runs ``action["command"]`` as ``bash -lc`` would, with an empty standard input.

        Returns:
            ``output`` (stdout and stderr, bytes that are not UTF-8 replaced), ``returncode``, ``exception_info``.

        Raises:
            InfraFault: the sandbox died or can't be reached.
            Submitted: (harness) the command succeeded and its first line is the harness' end mark.
        """
        command = action.get("command", "")
        refusal = _refusal(command)
        if refusal:
            return {"output": "", "returncode": -1, "exception_info": refusal}
        self.before_command()
        limit = timeout or self.timeout_s
        argv = ["bash", "-lc", _LOGIN_SHELL, "bash", self.toolchain, command]
        done = self.sandbox.run(argv, timeout_s=limit, cwd=cwd or REPO)
        output = self._text(done, limit)
        self.tripwires |= tripwires_in(output)
        result = {"output": output, "returncode": done.returncode, "exception_info": ""}
        DockerEnvironment._check_finished(cast(DockerEnvironment, self), result)  # it uses nothing of its object
        return result

    def _text(self, done: CommandResult, limit: float) -> str:
        text = done.text
        if done.truncated:
            text += f"\n[cooperbench] output cut after {len(done.output)} bytes."
        if done.timed_out:
            text += f"\n[cooperbench] command killed after {limit:g}s. Re-run it in a form that terminates."
        return text

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Variables for the prompt templates; the same on every host."""
        return {**self.config, **SYSTEM_INFORMATION, **kwargs}

    def serialize(self) -> dict[str, Any]:
        """Settings, in the harness' layout."""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        return {"info": {"config": {"environment": dict(self.config), "environment_type": kind}}}

    def cleanup(self) -> None:
        """Closes the sandbox."""
        self.sandbox.close()


def has_half_characters(text: str) -> bool:
    """Whether a text holds surrogates, which no encoding writes and no model reads."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def _refusal(command: str) -> str:
    """Why the operating system can't take this command as an argument, or ''."""
    reason = ""
    if "\0" in command:
        reason = "embedded null byte"
    elif has_half_characters(command):
        reason = "the command is not valid Unicode"
    elif len(command.encode()) >= MAX_COMMAND_BYTES:
        reason = f"Argument list too long (a command may have {MAX_COMMAND_BYTES - 1} bytes)"
    return reason and f"An error occurred while executing the command: {reason}"
