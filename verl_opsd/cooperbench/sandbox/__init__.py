"""Sandboxes: where agents' commands and hidden tests run."""

from __future__ import annotations

from verl_opsd.cooperbench.sandbox.base import CommandResult, Limits, Sandbox, SandboxSpec
from verl_opsd.cooperbench.sandbox.bubblewrap import BubblewrapSandbox
from verl_opsd.errors import OpsdError

__all__ = ["BubblewrapSandbox", "CommandResult", "Limits", "Sandbox", "SandboxSpec", "make_sandbox"]


def make_sandbox(backend: str, spec: SandboxSpec, *, allow_unsafe: bool = False) -> Sandbox:
    if backend == "bubblewrap":
        return BubblewrapSandbox(spec)
    raise OpsdError(f"sandbox backend {backend!r}", "known backends: bubblewrap", "choose one of them")
