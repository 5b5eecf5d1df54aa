"""Commands in a sandbox of the tests."""

from __future__ import annotations


def bash(sandbox, script: str, timeout_s: float = 20, **options):
    return sandbox.run(["bash", "-c", script], timeout_s=timeout_s, **options)


def python(sandbox, script: str, timeout_s: float = 20, **options):
    return sandbox.run(["python3", "-c", script], timeout_s=timeout_s, **options)
