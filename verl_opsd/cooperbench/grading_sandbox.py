"""The grader's sandboxes: one for merging, in which no code of a patch ever runs, and a fresh one for each test run.

A test run executes code that is not trusted. What it leaves behind (in the tree, its git directory, /patches, home, /usr/local/bin)
meets no other run, and what it does to the files that judge it is seen from the host: see :mod:`verl_opsd.cooperbench.watching`.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from verl_opsd.cooperbench.faults import grading_fault
from verl_opsd.cooperbench.prepare import REPO_INSIDE
from verl_opsd.cooperbench.sandbox import CommandResult, Sandbox, SandboxSpec, make_sandbox
from verl_opsd.cooperbench.types import PreparedTask
from verl_opsd.cooperbench.verdicts import results_line, touched_line
from verl_opsd.cooperbench.watching import split_runner, touched, watched, without_bytecode
from verl_opsd.errors import InfraFault
from verl_opsd.trees import temporary_tree

STEP_TIMEOUT_S = 120.0
_RUNNER = "/usr/local/bin/runner.sh"
#: What the runner does once the patches are applied.
_TESTS = "/usr/local/bin/tests-of-runner.sh"
_WRITE = re.compile(r"echo '[A-Za-z0-9+/=]*' \| base64 -d > /patches/([a-z0-9_.]+)")


@dataclass(frozen=True)
class ExecResult:
    """A command's result as the package reads it; stdout and stderr are one stream."""

    returncode: int
    output: str

    def stdout_read(self) -> str:
        return self.output

    def stderr_read(self) -> str:
        return ""


@dataclass(frozen=True)
class _Place:
    """An open sandbox and its folders on the host. ``hosted``: gives a text with the host's paths, where the sandbox maps none.
    ``split``: the runner applies the patches only, and ``_TESTS`` runs the tests."""

    sandbox: Sandbox
    workspace: Path
    patch_dir: Path
    hosted: Callable[[str], str]
    split: bool

    def run(self, argv: list[str], timeout_s: float, env: Mapping[str, str] | None = None) -> CommandResult:
        """One command.

        Raises:
            InfraFault: ``grader_died``.
        """
        hosted = {name: self.hosted(value) for name, value in (env or {}).items()}
        try:
            return self.sandbox.run([self.hosted(arg) for arg in argv], timeout_s=timeout_s, cwd=REPO_INSIDE, env=hosted)
        except InfraFault as fault:
            raise grading_fault("grader_died", str(fault)) from fault


class GradingSandbox:
    """What the package calls a sandbox: a copy of a task's base tree with ``/patches``; each test run has its own.

    Args:
        place: for everything but the test runs.
        fresh: opens the sandbox of a test run.
        patches: contents by name that replace what the package writes under these names: the agents' patches as is.
    """

    def __init__(
        self, place: _Place, fresh: Callable[[], AbstractContextManager[_Place]], timeout_s: float, patches: dict[str, bytes]
    ):
        self._place, self._fresh, self._timeout_s, self._patches = place, fresh, timeout_s, patches
        self.fault: InfraFault | None = None

    def write(self, name: str, content: bytes) -> None:
        """Writes ``/patches/<name>``, of any size, for every command and test run from here on."""
        (self._place.patch_dir / name).write_bytes(content)

    def exec(self, *args: str) -> ExecResult:
        """Runs a command of the package, or the runner.

        Raises:
            InfraFault: ``grader_died`` or ``grader_timeout``; kept in ``fault`` too, as the package catches all.
        """
        if write := _WRITE.fullmatch(args[-1]):
            name = write[1]
            self.write(name, self._patches.get(name, base64.b64decode(args[-1].split("'")[1])))
            return ExecResult(0, "")
        try:
            if any(f"bash {_RUNNER}" in arg for arg in args):
                return self._tests(list(args))
            return self._step(list(args))
        except InfraFault as fault:
            self.fault = fault
            raise

    def run_tests(self, tests: str, feature: str | None) -> ExecResult:
        """Runs the runner on patches that were written before; ``feature`` None: the base tree with the tests alone."""
        return self.exec("bash", "-c", f"bash {_RUNNER} {tests} {feature or ''}")

    def terminate(self) -> None:
        """The sandbox is closed by whoever opened it."""

    def _tests(self, argv: list[str]) -> ExecResult:
        """The runner, in a sandbox of its own. What its session wrote of each test, or that it touched what judges it, comes behind
        the output, in words that the package does not read."""
        results = f"results-{uuid.uuid4().hex}.xml"
        env = {"PYTEST_ADDOPTS": f"--junitxml=/patches/{results}"}
        with self._fresh() as place:
            shutil.copytree(self._place.patch_dir, place.patch_dir, dirs_exist_ok=True, copy_function=shutil.copyfile)
            if not place.split:
                result, text, seen = place.run(argv, self._timeout_s, env), "", ""
            else:
                result, text, seen = place.run(argv, self._timeout_s), "", ""
                if not (result.timed_out or result.returncode):
                    text = result.text
                    hidden = b"".join(path.read_bytes() for path in self._place.patch_dir.glob("tests*.patch"))
                    without_bytecode(place.workspace)
                    before = watched(place.workspace, hidden)
                    result = place.run(["bash", _TESTS], self._timeout_s, env)
                    seen = touched(place.workspace, before)
            text += result.text
            if result.timed_out:
                return ExecResult(124, f"{text}\nthe test run was killed after {self._timeout_s:g} s\n")
            cut = "\n(output cut)\n" if result.truncated else ""
            last = touched_line(seen) if seen else results_line(place.patch_dir / results)
        return ExecResult(result.returncode, text + cut + last)

    def _step(self, argv: list[str]) -> ExecResult:
        # The package writes the merged tree as a diff without the contents of binary files, which can't be applied.
        result = self._place.run([arg.replace("git diff ", "git diff --binary ") for arg in argv], STEP_TIMEOUT_S)
        if result.timed_out:
            raise grading_fault("grader_timeout", f"{argv} ran for {STEP_TIMEOUT_S:g} s")
        return ExecResult(result.returncode, result.text)


def _host_paths(binds: dict[str, Path]) -> Callable[[str], str]:
    """Replaces paths inside by the host's, in one pass, only where a path begins."""
    inside = "|".join(re.escape(path) for path in sorted(binds, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w./-])(?:{inside})(?![\w.-])")
    return lambda text: pattern.sub(lambda match: str(binds[match[0]]), text)


def _fix_merge_driver(repo: Path) -> None:
    """Git's three-way merge for every file: a patch's ``.gitattributes`` could ask for ``union``.

    A base tree that chooses merge drivers itself keeps them.
    """
    attributes = repo / ".gitattributes"
    if not (attributes.is_file() and "merge" in attributes.read_text(errors="replace")):
        (repo / ".git" / "info").mkdir(exist_ok=True)
        (repo / ".git" / "info" / "attributes").write_text("* merge\n")


@contextmanager
def _opened(prepared: PreparedTask, dataset_dir: Path, backend: str, allow_unsafe: bool) -> Iterator[_Place]:
    # In a run everything lies in its own temporary directory, which is removed however the run ends.
    with temporary_tree("opsd-grade-", os.environ.get("OPSD_TMP")) as folder:
        workspace, patch_dir = folder / "workspace", folder / "patches"
        patch_dir.mkdir()
        shutil.copytree(prepared.base, workspace / "repo", symlinks=True)
        _fix_merge_driver(workspace / "repo")
        prefix = prepared.python_prefix
        parts = split_runner(prepared.runner.read_text())
        scripts = {_RUNNER: parts[0], _TESTS: parts[1]} if len(parts) == 2 else {_RUNNER: parts[0]}
        own = [(folder / Path(inside).name, inside) for inside in scripts]
        read_only = [*own, (prefix, str(prefix)), *prepared.ro_binds]
        writable = [(patch_dir, "/patches")]
        env: dict[str, str] = dict(prepared.env)
        hosted: Callable[[str], str] = str
        if backend == "process":  # maps no paths: everything is told the host's
            hosted = _host_paths({inside: host for host, inside in [(workspace, "/workspace"), *read_only, *writable]})
            read_only, writable = [[(host, str(host)) for host, _ in binds] for binds in (read_only, writable)]
            env = {name: hosted(value) for name, value in env.items()}
        for host, inside in own:
            host.write_text(hosted(scripts[inside]))
        spec = SandboxSpec(
            name=folder.name,
            workspace=workspace,
            ro_binds=tuple(read_only),
            rw_binds=tuple(writable),
            env=env,
            hidden=(dataset_dir,),
        )
        try:
            sandbox = make_sandbox(backend, spec, allow_unsafe=allow_unsafe)
        except InfraFault as fault:
            raise grading_fault("grader_died", str(fault)) from fault
        try:
            yield _Place(sandbox, workspace, patch_dir, hosted, len(parts) == 2)
        finally:
            sandbox.close()


@contextmanager
def grading_sandbox(
    prepared: PreparedTask,
    dataset_dir: Path,
    patches: dict[str, bytes],
    *,
    backend: str,
    allow_unsafe: bool,
    timeout_s: float,
) -> Iterator[GradingSandbox]:
    """A grader's sandbox; afterwards its processes and files are gone.

    Raises:
        InfraFault: ``grader_died``: the sandbox could not be started, or its python is not the prepared one.
    """
    fresh = partial(_opened, prepared, dataset_dir, backend, allow_unsafe)
    with fresh() as place:
        box = GradingSandbox(place, fresh, timeout_s, patches)
        python, prefix = box.exec("bash", "-c", "command -v python").output.strip(), prepared.python_prefix
        if python != f"{prefix}/bin/python":
            # Tests on another interpreter than the prepared one would be another measurement.
            raise grading_fault("grader_died", f"python is {python!r}, not {prefix}/bin/python")
        yield box
