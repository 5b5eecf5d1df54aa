"""Grades a pair's patches with the ``cooperbench`` package's own merge and test procedure, in this project's sandbox.

The package's ``eval.sandbox.test_merged`` decides what is merged and which suites run on it. What is ours: the sandbox
behind it, how patches get into it (of any size, byte for byte), the limits, what counts as a pass, and telling faults
of the infrastructure from failures of the code:

- A **test run** past its limit is the merged code's doing: it is killed and the feature fails, with exit code 124.
- Any **other step** past its limit, a sandbox that dies, and an error of the package are faults: :class:`InfraFault` of
  kind ``grader_timeout`` or ``grader_died``, never a score.

The verdicts are in :mod:`verl_opsd.cooperbench.verdicts`.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_opsd.cooperbench.faults import grading_fault
from verl_opsd.cooperbench.feature_table import load_table
from verl_opsd.cooperbench.grading_sandbox import GradingSandbox, grading_sandbox
from verl_opsd.cooperbench.identity import load_harness
from verl_opsd.cooperbench.tampering import reaches_for_tests
from verl_opsd.cooperbench.types import PairTask, PreparedTask
from verl_opsd.cooperbench.verdicts import feature_grade, verdicts, withheld
from verl_opsd.errors import OpsdError
from verl_opsd.tokens.records import FeatureGrade, Grade

#: Test runs of a grade at most: both suites on each agent's patch where the merge failed (two on the merged tree where it did not).
TEST_RUNS = 4

# The package takes a short string for a file's name if it can be one, and fails where it is too long for a name.
_PREAMBLE = "".join(f"# patch of an agent, preamble line {n}\n" for n in range(20))


def grade_patch(
    task: PairTask | Path,
    feature_id: int,
    prepared: PreparedTask,
    patch: str | None,
    *,
    backend: str = "bubblewrap",
    allow_unsafe: bool = False,
    timeout_s: float = 120.0,
) -> FeatureGrade:
    """One feature's hidden tests on the base tree with one patch; ``patch=None``: on the untouched base tree.

    ``task`` is a pair or a task folder. The gold count is not asked for here: this is what measures it.

    Raises:
        InfraFault: see the module's text.
    """
    task_dir = (task.task_dir if isinstance(task, PairTask) else task).absolute()
    tests = (task_dir / f"feature{feature_id}" / "tests.patch").read_bytes()
    with grading_sandbox(
        prepared, task_dir.parents[1], {}, backend=backend, allow_unsafe=allow_unsafe, timeout_s=timeout_s
    ) as box:
        box.write("tests.patch", tests)
        if patch is not None:
            box.write("feature.patch", _bytes(patch))
        result = box.run_tests("tests.patch", None if patch is None else "feature.patch")
    return feature_grade(feature_id, result.returncode, result.output, None)


@dataclass(frozen=True)
class _Backend:
    """One grading's sandbox as the package's evaluation backend."""

    box: GradingSandbox
    image: str

    def create_sandbox(self, image: str, timeout: int = 600, workdir: str = "/workspace") -> GradingSandbox:
        if image != self.image:
            raise OpsdError(f"image {image}", f"this grading is of {self.image}", "report this as a bug")
        return self.box


class _Dispatcher:
    """Stands in for the package's ``get_backend``: a name from :meth:`open` gives its backend, others go through.

    The package has no registry of backends; it looks this name up in its own module, once a grading. Each grading has a
    name of its own, so that any number of them can run in threads.
    """

    def __init__(self, original: Callable[[str], Any]):
        self._original = original
        self._backends: dict[str, _Backend] = {}

    def __call__(self, name: str = "docker") -> Any:
        return self._backends[name] if name in self._backends else self._original(name)

    @contextmanager
    def open(self, backend: _Backend) -> Iterator[str]:
        name = f"verl_opsd:{uuid.uuid4().hex}"
        self._backends[name] = backend
        try:
            yield name
        finally:
            del self._backends[name]


_install_lock = threading.Lock()
_NEEDED = ("test_merged", "get_backend", "get_image_name", "_filter_test_files", "_run_tests")


def _package() -> ModuleType:
    """The package's grader with our dispatcher in it, installed once a process.

    Raises:
        OpsdError: the package is absent, or a name that this module relies on has moved.
    """
    try:
        load_harness()
        from cooperbench.eval import sandbox as package
    except ImportError as e:
        raise OpsdError(
            f"cooperbench can't be imported: {e}", "pairs are graded by this package", "install verl-opsd[cooperbench]"
        ) from e
    missing = [name for name in _NEEDED if not hasattr(package, name)]
    if missing:
        raise OpsdError(
            f"{package.__file__} lacks {', '.join(missing)}", "written for cooperbench 0.0.29", "install that version"
        )
    with _install_lock:
        if not isinstance(package.get_backend, _Dispatcher):
            package.get_backend = _Dispatcher(package.get_backend)
    return package


def grade_pair(
    pair: PairTask,
    prepared: PreparedTask,
    patch1: str,
    patch2: str,
    *,
    backend: str = "bubblewrap",
    allow_unsafe: bool = False,
    timeout_s: float = 120.0,
) -> Grade:
    """Merges two patches and runs both features' hidden tests on the result. Thread-safe.

    Args:
        patch1: of the first feature's agent, as ``git diff`` writes it; empty: nothing was handed in. Bytes that are
            not UTF-8 may stand in it as ``surrogateescape`` leaves them.
        timeout_s: limit of each of the two test runs, seconds.

    Raises:
        InfraFault: ``grader_died`` or ``grader_timeout``.
        OpsdError: pair and prepared task do not belong together, or the package is not usable.
    """
    if (pair.repo, pair.task_id) != (prepared.repo, prepared.task_id):
        raise OpsdError(
            f"pair {pair.key}, prepared task {prepared.repo}/task{prepared.task_id}",
            "a pair is graded on its own task's tree",
            "load the prepared task of the pair",
        )
    started = time.monotonic()
    package = _package()
    own = [_without_tests(package, patch) for patch in (patch1, patch2)]
    # What the package handles is a stand-in of each patch: empty and equal exactly where the patches are. The sandbox
    # writes the patches themselves: the package would rewrite quotes in them.
    stand_in = [_PREAMBLE + text.encode("utf-8", "backslashreplace").decode() if text else "" for text in own]
    contents = {f"patch{n}.patch": _bytes(text) for n, text in enumerate(own, 1)}
    first, second = pair.features
    with (
        grading_sandbox(
            prepared, pair.dataset_dir, contents, backend=backend, allow_unsafe=allow_unsafe, timeout_s=timeout_s
        ) as box,
        package.get_backend.open(_Backend(box, package.get_image_name(pair.repo, pair.task_id))) as name,
    ):
        result = package.test_merged(
            pair.repo, pair.task_id, first, second, *stand_in, backend=name, dataset_dir=pair.dataset_dir
        )
        second_alone = _second_alone(package, box, prepared.base_sha, result) if box.fault is None else []
    if box.fault:
        raise box.fault
    if result["error"]:
        raise grading_fault("grader_died", f"{pair.key}: {result['error'][-2000:]}")
    table = load_table(prepared)
    features, strategy, strict = verdicts(pair.features, table.rows if table else {}, result, second_alone)
    tested = {"solo-agent1": own[:1], "solo-agent2": own[1:]}.get(strict, own)
    if found := "; ".join(filter(None, map(reaches_for_tests, tested))):
        features = withheld(features, f"a patch reaches for the test runner: {found}")
    return Grade(
        merge=result["merge"]["status"],
        strategy=strategy,
        apply_status=dict(result["apply_status"]),
        features=features,
        seconds=time.monotonic() - started,
        strict_strategy=strict,
    )


def _second_alone(package: ModuleType, box: GradingSandbox, base_sha: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Both suites on the second agent's patch, where the merge failed and nobody's work has passed both; the second suite only
    when the first passed."""
    failed = not result["error"] and result["merge"]["status"] in ("conflicts", "missing_input")
    if not failed or result["both_passed"] or result["apply_status"]["agent2"] != "applied":
        return []
    first = package._run_tests(box, "tests1.patch", "patch2.patch", base_sha)
    return [first, package._run_tests(box, "tests2.patch", "patch2.patch", base_sha)] if first["passed"] else []


def without_tests(patch: str) -> str:
    """A patch without its sections on test files, as it is graded; empty where nothing is left."""
    return _without_tests(_package(), patch)


def _without_tests(package: ModuleType, patch: str) -> str:
    """A patch without its sections on test files, by the package's own rule; empty where nothing is left."""
    filtered = package._filter_test_files(patch)
    return filtered if filtered.strip() else ""


def _bytes(patch: str) -> bytes:
    try:
        return patch.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as e:
        raise OpsdError(
            f"patch: {e}", "a patch is UTF-8 text, other bytes as surrogateescape leaves them", "decode it in this way"
        ) from e
