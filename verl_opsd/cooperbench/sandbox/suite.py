"""What every sandbox promises, as checks that run against any backend: in the tests, and on a user's machine by
``opsd doctor --sandbox BACKEND``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl_opsd.cooperbench.sandbox.base import CommandResult, Limits, Sandbox, SandboxSpec
from verl_opsd.errors import InfraFault, OpsdError

#: Opens a sandbox with an empty ``repo`` in its workspace; keywords: fields of SandboxSpec, and ``limits`` as a dict.
Open = Callable[..., Sandbox]
Check = Callable[[Open], None]
SUITE: dict[str, Check] = {}
#: Checks that a backend which isolates nothing can't pass.
ISOLATED = ("no network", "the data set is out of reach", "a session of its own does not outlive a command")
#: Writes for ever.
_BEAT = "while :; do echo x >> beat; sleep 0.05; done"


class Broken(Exception):
    """A promise that a backend does not keep."""


def check(name: str) -> Callable[[Check], Check]:
    """Adds a check to the suite."""

    def add(function: Check) -> Check:
        SUITE[name] = function
        return function

    return add


def expect(holds: object, what: object) -> None:
    """Raises Broken unless it holds."""
    if not holds:
        raise Broken(str(what)[:1000])


def bash(sandbox: Sandbox, script: str, timeout_s: float = 30.0, **options: Any) -> CommandResult:
    """Runs a script in a plain bash."""
    return sandbox.run(["bash", "-c", script], timeout_s=timeout_s, **options)


@check("a command succeeds or fails")
def _codes(open_: Open) -> None:
    sandbox = open_()
    expect(bash(sandbox, "echo out; echo err >&2; echo last").output == b"out\nerr\nlast\n", "output is not in order")
    for code in (0, 1, 124, 125, 126, 127, 137, 255):
        result = bash(sandbox, f"exit {code}")
        expect((result.returncode, result.timed_out) == (code, False), f"exit {code} gave {result}")
    result = bash(sandbox, "kill -9 $$")
    expect(result.returncode == 137 and not result.timed_out, f"a killed command gave {result}")


@check("a command that cannot start failed")
def _cannot_start(open_: Open) -> None:
    sandbox = open_()
    for argv, options, code in (
        (["no-such-program"], {}, 127),
        (["true"], {"cwd": "/workspace/absent"}, 125),
        (["echo", "a\0b"], {}, 126),
        (["echo", "\ud83d"], {}, 126),
        (["echo", "x" * 200_000], {}, 126),
    ):
        result = sandbox.run(argv, timeout_s=30, **options)  # type: ignore[arg-type]
        expect(result.returncode == code and result.output, f"{argv[0]} {options}: {code} expected, {result}"[:300])


@check("a command past its limit is killed with its tree")
def _timeout(open_: Open) -> None:
    sandbox = open_()
    result = bash(sandbox, f"echo started; trap '' TERM; ({_BEAT}) & (({_BEAT}) &) ; sleep 60; sleep 60", timeout_s=1.0)
    expect((result.returncode, result.timed_out, result.output) == (124, True, b"started\n"), result)
    _still(sandbox)
    result = sandbox.run(["yes"], timeout_s=0.5)
    expect(result.timed_out and result.truncated, "a flood of output past the limit did not end as one")


@check("background processes end with their command")
def _background(open_: Open) -> None:
    sandbox = open_()
    started = time.monotonic()
    result = bash(sandbox, f"nohup bash -c 'trap \"\" TERM; {_BEAT}' > /dev/null 2>&1 & sleep 0.5; disown -a; echo over")
    expect((result.returncode, result.text) == (0, "over\n"), result)
    result = bash(sandbox, "sleep 50 & echo over")  # this one holds the output too
    expect((result.returncode, result.text) == (0, "over\n"), result)
    expect(time.monotonic() - started < 25, "a background process held the caller")
    _still(sandbox)


@check("a session of its own does not outlive a command")
def _detached(open_: Open) -> None:
    sandbox = open_()
    for wait, timeout_s in (("sleep 0.5", 30.0), ("sleep 60", 1.0)):
        bash(sandbox, f"rm -f beat; setsid -f setsid -f bash -c 'trap \"\" TERM; {_BEAT}' > /dev/null 2>&1; {wait}", timeout_s)
        _still(sandbox)


def _still(sandbox: Sandbox) -> None:
    size = bash(sandbox, "stat -c %s beat").text
    expect(size.strip().isdigit(), f"no process wrote: {size}")
    expect(bash(sandbox, "sleep 0.4; stat -c %s beat").text == size, "a process still writes after its command has ended")


@check("bytes and standard input")
def _bytes(open_: Open) -> None:
    sandbox = open_()
    expect(bash(sandbox, r"printf '\xb3\xff'").output == b"\xb3\xff", "bytes that are not UTF-8 did not arrive")
    started = time.monotonic()
    expect(sandbox.run(["cat"], timeout_s=20).output == b"" and time.monotonic() - started < 10, "stdin did not end")
    data = bytes(range(256)) * 4096
    expect(sandbox.run(["cat"], timeout_s=30, stdin=data).output == data, "a megabyte of stdin did not come back")


@check("output and files have limits")
def _limits(open_: Open) -> None:
    sandbox = open_(limits={"output_bytes": 100_000, "file_bytes": 1 << 20})
    result = bash(sandbox, "head -c 5000000 /dev/zero; touch done; ls")
    expect((len(result.output), result.truncated, result.returncode) == (100_000, True, 0), "output was not cut at its limit")
    expect("done" in bash(sandbox, "ls").text, "a cut command did not go on")
    result = bash(sandbox, "exec head -c 5000000 /dev/zero > big")
    size = bash(sandbox, "stat -c %s big").text
    expect(result.returncode == 153 and size == "1048576\n", f"a file past its limit: {result.returncode}, {size}")


@check("the environment is what was given")
def _environment(open_: Open) -> None:
    sandbox = open_(env={"A": "1", "B": "spec", "HOME": "/workspace"})
    lines = sandbox.run(["env"], timeout_s=20, cwd="/", env={"B": "a b\nc=d"}).text.replace("a b\nc=d", "<B>").splitlines()
    path = "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    expect(sorted(lines) == ["A=1", "B=<B>", "HOME=/workspace", "LANG=C.UTF-8", path], lines)


@check("files stay between commands")
def _files(open_: Open) -> None:
    sandbox = open_()
    bash(sandbox, "echo 1 > a; echo 2 > ~/b; mkdir -p sub; ln -s a link")
    expect(bash(sandbox, "cat a ~/b link; pwd").text == "1\n2\n1\n" + bash(sandbox, "pwd").text, "files did not stay")
    sandbox.close()
    left = sorted(path.name for path in (sandbox.spec.workspace / "repo").iterdir())
    expect(left == ["a", "link", "sub"], f"the caller's workspace holds {left} after the sandbox was closed")


@check("git works")
def _git(open_: Open) -> None:
    sandbox = open_()
    script = (
        "git init -q . && git config user.email a@b && git config user.name a && echo x > f && git add f && git commit -qm m"
    )
    result = bash(sandbox, f"{script} && git merge-tree --write-tree HEAD HEAD && git status --porcelain")
    expect(result.returncode == 0 and len(result.text.strip()) == 40, f"git 2.38 or later is needed: {result.text}")


@check("commands run at once")
def _at_once(open_: Open) -> None:
    sandbox = open_()

    def one(number: int) -> bytes:
        return bash(sandbox, f"read x; sleep 0.2; echo {number}-$x", stdin=f"{number * 7}\n".encode(), timeout_s=60).output

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, range(16)))
    expect(results == [f"{number}-{number * 7}\n".encode() for number in range(16)], results)


@check("sixteen sandboxes at once")
def _sixteen(open_: Open) -> None:
    def one(number: int) -> str:
        sandbox = open_()
        text = bash(sandbox, f"echo {number} > mine; cat mine", timeout_s=120).text
        sandbox.close()
        return text

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(one, range(16)))
    expect(results == [f"{number}\n" for number in range(16)], results)


@check("closing ends a running command, and is not undone")
def _close(open_: Open) -> None:
    sandbox = open_()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sandbox.run, ["sleep", "50"], timeout_s=60)
        time.sleep(1.0)
        sandbox.close()
        expect(_fault(future.result) == "sandbox_died", "a command whose sandbox was closed is not a fault of the sandbox")
    sandbox.close()
    expect(_fault(lambda: sandbox.run(["true"], timeout_s=5)) == "sandbox_died", "a closed sandbox ran a command")


def _fault(work: Callable[[], object]) -> str:
    try:
        work()
    except InfraFault as fault:
        return fault.kind
    return ""


@check("no network")
def _no_network(open_: Open) -> None:
    sandbox = open_()
    with socket.create_server(("0.0.0.0", 0)) as server:
        server.settimeout(0.3)
        script = f"for h in 127.0.0.1 {socket.gethostbyname(socket.gethostname())} 192.0.2.1; do"
        script += f' timeout 2 bash -c "echo x > /dev/tcp/$h/{server.getsockname()[1]}" && echo connected; done'
        expect("connected" not in bash(sandbox, script).text, "a command reached a socket of the host")
        with contextlib.suppress(TimeoutError):
            server.accept()
            raise Broken("a command reached a socket of the host")


@check("the data set is out of reach")
def _dataset(open_: Open) -> None:
    secret = secrets.token_hex(16)
    with tempfile.NamedTemporaryFile("w", prefix="opsd-gold-", suffix=".patch") as file:
        file.write(secret)
        file.flush()
        Path(file.name).chmod(0o644)
        sandbox = open_()
        result = bash(
            sandbox, f"cat {file.name} /proc/1/root{file.name}; find / -name 'opsd-gold-*' -exec cat {{}} + 2>/dev/null"
        )
        expect(secret not in result.text, "a command read a file of the host")


def run_suite(backend: str, *, allow_unsafe: bool = False) -> Iterator[tuple[str, bool, str]]:
    """Runs every check against a backend on this machine: (name, kept, what went wrong or the seconds it took)."""
    for name, function in SUITE.items():
        if backend == "process" and name in ISOLATED:
            continue
        started = time.monotonic()
        try:
            with opened(backend, allow_unsafe=allow_unsafe) as open_:
                function(open_)
        except (Broken, InfraFault, OpsdError, OSError, ValueError) as error:
            yield name, False, f"{type(error).__name__}: {error}"
        else:
            yield name, True, f"{time.monotonic() - started:.1f} s"


@contextlib.contextmanager
def opened(backend: str, *, allow_unsafe: bool = False) -> Iterator[Open]:
    """Gives a check its sandboxes, and closes them."""
    from verl_opsd.cooperbench.sandbox import make_sandbox

    made: list[Sandbox] = []
    numbers = itertools.count()
    with tempfile.TemporaryDirectory(prefix="opsd-suite-") as directory:

        def open_(**fields: Any) -> Sandbox:
            number = next(numbers)
            workspace = Path(directory) / f"workspace{number}"
            (workspace / "repo").mkdir(parents=True)
            limits = dataclasses.replace(Limits(memory_bytes=512 << 20), **fields.pop("limits", {}))
            spec = SandboxSpec(f"suite-{number}", workspace, limits=limits, **fields)
            made.append(make_sandbox(backend, spec, allow_unsafe=allow_unsafe))
            return made[-1]

        try:
            yield open_
        finally:
            for sandbox in made:
                sandbox.close()
