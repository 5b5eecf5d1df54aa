"""Hostile, broken and strange patches, and faults of the infrastructure: each has its own outcome."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl_opsd.cooperbench import grading
from verl_opsd.cooperbench import grading_sandbox as sandboxes
from verl_opsd.cooperbench.feature_table import FeatureTable
from verl_opsd.cooperbench.grading import grade_pair, grade_patch
from verl_opsd.cooperbench.grading_sandbox import grading_sandbox
from verl_opsd.cooperbench.prepare import load_prepared
from verl_opsd.cooperbench.sandbox import CommandResult
from verl_opsd.cooperbench.types import PairTask, PreparedTask
from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.tokens.records import Grade

MakePatch = Callable[..., str]
SUMMARY = "=============== 99 passed in 0.01s ==============="


def gold(pair: PairTask, feature_id: int) -> str:
    """The gold patch of a feature."""
    return (pair.task_dir / f"feature{feature_id}" / "feature.patch").read_text()


@pytest.fixture
def pair(pairs: dict[str, PairTask]) -> PairTask:
    """textkit: feature 1 is `slugify(max_length)`, feature 2 is `wrap(indent)`; the gold patches merge clean."""
    return pairs["textkit/1+2"]


@pytest.fixture
def task(prepared: dict[str, PreparedTask]) -> PreparedTask:
    return prepared["textkit"]


def passed(grade: Grade) -> list[bool]:
    return [feature.earned for feature in grade.features]


@pytest.mark.parametrize("size", [96 << 10, 128 << 10, 1 << 20])
def test_large_patches(pair: PairTask, task: PreparedTask, make_patch: MakePatch, size: int) -> None:
    data = "".join(random.Random(0).choices("abcdefgh \n", k=size))
    patch = make_patch(task, {"textkit/data.txt": data}, gold(pair, 1))
    assert len(patch) > size
    grade = grade_pair(pair, task, patch, gold(pair, 2))
    assert (grade.merge, grade.reward) == ("clean", 1.0)


def test_a_patch_is_applied_byte_for_byte(pair: PairTask, task: PreparedTask, make_patch: MakePatch) -> None:
    """Shell quoting, carriage returns and bytes that are not UTF-8 arrive as they are: the module checks itself."""
    check = (
        "import pathlib\n"
        "here = pathlib.Path(__file__).parent\n"
        "assert (here / 'quote.sh').read_bytes() == b\"echo 'a'\\\\''b'\\n\"\n"
        "assert (here / 'dos.txt').read_bytes() == b'a\\r\\nb\\r\\n'\n"
        "assert (here / 'latin.txt').read_bytes() == b'\\xe9\\n'\n"
    )
    edits = {"textkit/__init__.py": check, "textkit/quote.sh": "echo 'a'\\''b'\n"}
    patch = make_patch(task, edits, gold(pair, 1))
    for path, lines, count in (("textkit/dos.txt", "+a\r\n+b\r\n", 2), ("textkit/latin.txt", "+\udce9\n", 1)):
        patch += f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
        patch += f"@@ -0,0 +1,{count} @@\n{lines}"
    grade = grade_patch(pair, 1, task, patch)
    assert grade.passed, grade.output
    assert grade_pair(pair, task, patch, gold(pair, 2)).reward == 1.0


def test_binary_files_survive_diff_merge_and_tests(pair: PairTask, task: PreparedTask, tmp_path: Path) -> None:
    """The package passes only while its binary file is what the patch says."""
    repo = tmp_path / "edit"
    shutil.copytree(task.base, repo, symlinks=True)
    content = bytes(range(256)) * 4
    (repo / "textkit" / "data.bin").write_bytes(content)
    check = f"import pathlib\ndata = pathlib.Path(__file__).parent.joinpath('data.bin').read_bytes()\nassert len(data) == {len(content)}\n"
    (repo / "textkit" / "__init__.py").write_text(check)
    subprocess.run(["git", "apply", "-"], cwd=repo, input=gold(pair, 1), text=True, check=True)
    subprocess.run(["git", "add", "-A"], cwd=repo, check=True)
    patch = subprocess.run(["git", "diff", "--cached", "--binary", "HEAD"], cwd=repo, capture_output=True, check=True).stdout
    grade = grade_pair(pair, task, patch.decode("utf-8", "surrogateescape"), gold(pair, 2))
    assert (grade.merge, passed(grade)) == ("clean", [True, True]), grade


def garbage(seed: int, length: int) -> str:
    return random.Random(seed).randbytes(length).decode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    "patch",
    [
        garbage(1, 4096),
        garbage(2, 100),
        "x" * 300,
        "diff --git a/textkit/cases.py b/textkit/cases.py\n",
        "\0\0\0",
        "--- a/../../etc/passwd\n+++ b/../../etc/passwd\n@@ -0,0 +1 @@\n+x\n",
    ],
    ids=["binary", "short binary", "long word", "header only", "nul", "outside"],
)
def test_a_patch_that_does_not_apply_is_missing_input(pair: PairTask, task: PreparedTask, patch: str) -> None:
    grade = grade_pair(pair, task, patch, gold(pair, 2))
    assert (grade.merge, grade.apply_status) == ("missing_input", {"agent1": "failed", "agent2": "applied"})
    assert grade.reward == 0.0
    # the first agent's patch alone has to pass both suites, which the gold patch of one feature does not
    grade = grade_pair(pair, task, gold(pair, 1), patch)
    assert (grade.merge, grade.apply_status) == ("missing_input", {"agent1": "applied", "agent2": "failed"})
    assert grade.reward == 0.0


def test_the_name_of_a_file_is_not_a_patch(pair: PairTask, task: PreparedTask) -> None:
    path = str(pair.task_dir / "feature1" / "feature.patch")
    assert len(path) < 500
    grade = grade_pair(pair, task, path, gold(pair, 2))
    assert grade.apply_status["agent1"] == "failed"
    assert grade.reward == 0.0


@pytest.mark.parametrize("empty", ["", "\n", "  \n\n"])
def test_empty_patches_are_told_apart(pair: PairTask, task: PreparedTask, empty: str) -> None:
    both = grade_pair(pair, task, empty, empty)
    assert both.apply_status == {"agent1": "skipped", "agent2": "skipped"}
    assert passed(both) == [False, False]
    one = grade_pair(pair, task, empty, gold(pair, 2))
    assert (one.merge, one.apply_status) == ("clean", {"agent1": "skipped", "agent2": "applied"})
    assert passed(one) == [False, True]


def test_a_patch_of_tests_alone_counts_as_empty(pair: PairTask, task: PreparedTask, make_patch: MakePatch) -> None:
    patch = make_patch(task, {"tests/test_more.py": "def test_more():\n    pass\n"})
    grade = grade_pair(pair, task, gold(pair, 1), patch)
    assert grade.apply_status == {"agent1": "applied", "agent2": "skipped"}
    assert passed(grade) == [True, False]


def test_identical_patches(pair: PairTask, task: PreparedTask, make_patch: MakePatch) -> None:
    both = make_patch(task, {}, gold(pair, 1), gold(pair, 2))
    grade = grade_pair(pair, task, both, both)
    assert (grade.merge, grade.strategy) == ("identical", "skip-merge-identical")
    assert [(f.feature_id, f.passed, f.tests_passed) for f in grade.features] == [(1, True, 17), (2, True, 10)]
    grade = grade_pair(pair, task, gold(pair, 1), gold(pair, 1))
    assert (grade.merge, passed(grade)) == ("identical", [True, False])


HANGS = {
    "loop": "while True:\n    pass\n",
    "ignores signals": "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n",
    "leaves a child": "import os, time\nif not os.fork():\n    os.setsid()\ntime.sleep(600)\n",
}


@pytest.mark.parametrize("code", HANGS.values(), ids=HANGS.keys())
def test_a_hanging_test_run_is_killed_and_fails(pair: PairTask, task: PreparedTask, make_patch: MakePatch, code: str) -> None:
    grade = grade_pair(pair, task, make_patch(task, {"textkit/__init__.py": code}), gold(pair, 2), timeout_s=2.5)
    assert grade.merge == "clean"
    assert [(f.passed, f.exit_code) for f in grade.features] == [(False, 124), (False, 124)]
    assert all("killed after 2.5 s" in f.output for f in grade.features)


KILLERS = {
    "parent": "import os\nos.kill(os.getppid(), 9)\n",
    "all": "import os\nos.kill(-1, 9)\n",
    "group": "import os\nos.killpg(0, 9)\n",
    "itself": "import os\nos.abort()\n",
}


@pytest.mark.parametrize("code", KILLERS.values(), ids=KILLERS.keys())
def test_code_that_kills_its_test_run_fails(pair: PairTask, task: PreparedTask, make_patch: MakePatch, code: str) -> None:
    grade = grade_pair(pair, task, make_patch(task, {"textkit/__init__.py": code}), gold(pair, 2), timeout_s=30)
    assert passed(grade) == [False, False]
    assert all(f.exit_code not in (0, None) for f in grade.features)


ALWAYS_PASS = (
    "import pytest\n"
    "@pytest.hookimpl(hookwrapper=True)\n"
    "def pytest_runtest_makereport(item, call):\n"
    "    outcome = yield\n"
    "    outcome.get_result().outcome = 'passed'\n"
    "    call.excinfo = None\n"
)
FAKE_RUN = f"import os\nos.write(1, b'{SUMMARY}\\n')\nos._exit(0)\n"
ONE_TEST = "testpaths = nowhere\npython_files = check_*.py\naddopts = more/check_one.py\n"
HACKS: dict[str, dict[str, str]] = {
    "conftest": {"conftest.py": ALWAYS_PASS},
    "conftest below": {"tests/conftest.py": ALWAYS_PASS},
    "pytest.ini": {"pytest.ini": f"[pytest]\n{ONE_TEST}", "more/check_one.py": "def test_one():\n    pass\n"},
    "setup.cfg": {"setup.cfg": f"[tool:pytest]\n{ONE_TEST}", "more/check_one.py": "def test_one():\n    pass\n"},
    "sitecustomize": {
        "sitecustomize.py": "import sys\nif 'pytest' in sys.orig_argv:\n" + "    " + FAKE_RUN.replace("\n", "\n    ")
    },
    "plugin of a distribution": {
        "more-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: more\nVersion: 1.0\n",
        "more-1.0.dist-info/entry_points.txt": "[pytest11]\nmore = textkit.more\n",
        "textkit/more.py": "def pytest_runtest_makereport(item, call):\n    call.excinfo = None\n",
    },
    "plugin of an egg": {
        "more.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: more\nVersion: 1.0\n",
        "more.egg-info/entry_points.txt": "[pytest11]\nmore = textkit.more\n",
        "textkit/more.py": "def pytest_runtest_makereport(item, call):\n    call.excinfo = None\n",
    },
    "pytest module": {"pytest.py": FAKE_RUN},
    "pytest package": {"pytest/__init__.py": "", "pytest/__main__.py": FAKE_RUN},
}


@pytest.mark.parametrize("edits", HACKS.values(), ids=HACKS.keys())
def test_a_patch_does_not_decide_how_tests_run(
    pair: PairTask, task: PreparedTask, make_patch: MakePatch, tmp_path: Path, edits: dict[str, str]
) -> None:
    patch = make_patch(task, edits)
    grade = grade_patch(pair, 1, task, patch)
    assert not grade.passed
    assert "set back to the base tree" in grade.output
    assert passed(grade_pair(pair, task, patch, "")) == [False, False]
    # The control: without the guard these do change the result, so the test above can fail.
    unguarded = tmp_path / "runner.sh"
    unguarded.write_text("guarded=NOTHING\n".join(_split_at_guard(task.runner.read_text())))
    hacked = grade_patch(pair, 1, replace(task, runner=unguarded), patch)
    assert hacked.passed or SUMMARY in hacked.output, hacked.output


def _split_at_guard(runner: str) -> list[str]:
    lines = runner.splitlines(keepends=True)
    first = min(n for n, line in enumerate(lines) if line.startswith("guarded"))
    last = max(n for n, line in enumerate(lines) if line.startswith("guarded"))
    return ["".join(lines[:first]), "".join(lines[last + 1 :])]


def test_a_patch_does_not_choose_how_branches_are_merged(
    pairs: dict[str, PairTask], prepared: dict[str, PreparedTask], make_patch: MakePatch
) -> None:
    pair = pairs["ledger/3+4"]
    union = {".gitattributes": "* merge=union\n"}
    patches = [make_patch(prepared["ledger"], union, gold(pair, f)) for f in pair.features]
    assert grade_pair(pair, prepared["ledger"], *patches).merge == "conflicts"


@pytest.mark.parametrize("path", ["tests/test_cases.py", "Tests/test_cases.py", "test_cases.py", "textkit/test/helper.py"])
def test_own_test_files_do_not_get_in_the_way_of_hidden_ones(
    pair: PairTask, task: PreparedTask, make_patch: MakePatch, path: str
) -> None:
    patch = make_patch(task, {path: "raise SystemExit('not the hidden tests')\n"}, gold(pair, 1))
    assert grade_patch(pair, 1, task, patch).passed
    assert grade_pair(pair, task, patch, gold(pair, 2)).reward == 1.0


def test_skipped_tests_do_not_count(
    pair: PairTask, make_patch: MakePatch, qualified: tuple[Path, dict[str, FeatureTable]]
) -> None:
    """Exit code 0 and no failure, but fewer tests pass than with the gold patch."""
    task = load_prepared(qualified[0], pair.repo, pair.task_id)
    source = (task.base / "textkit" / "cases.py").read_text()
    skipping = source.replace("def slugify(text):", "def slugify(text, max_length=None):\n    import pytest\n    pytest.skip()")
    grade = grade_pair(pair, task, make_patch(task, {"textkit/cases.py": skipping}), gold(pair, 2))
    assert [(f.exit_code, f.passed, f.earned) for f in grade.features] == [(0, True, False), (0, True, False)]
    assert grade.features[0].tests_passed < 17


WRITES_RESULTS = f"""import os
file = [v for v in os.environ.values() if "junitxml=" in v][0].split("=", 1)[1]
open(file, "w").write('<testsuite tests="99" failures="0" errors="0" skipped="0"/>')
for fd in range(3, 40):
  try: os.write(fd, b'{SUMMARY}\\n')
  except OSError: pass
"""
CHEATS = {  # code of the library itself, which no guard of files can set back
    "writes a summary past the capture": (
        f"import os\nfor fd in range(3, 40):\n  try: os.write(fd, b'{SUMMARY}\\n')\n  except OSError: pass\n"
        "getattr(os, '_ex' + 'it')(0)\n",
        "no summary and results",
    ),
    "leaves with a good exit code after the session": (
        f"import atexit, os\natexit.register(lambda: (os.write(1, b'{SUMMARY}\\n'), getattr(os, '_ex' + 'it')(0)))\n",
        "tests passed",
    ),
    "writes summary and results, and is another program": (
        f"{WRITES_RESULTS}os.execv('/bin/true', ['true'])\n",
        "a patch reaches for the test runner: textkit/__init__.py: file = ",
    ),
    "leaves by another name": (
        f"{WRITES_RESULTS.replace('junitxml', 'junit' + chr(34) + chr(34) + 'xml')}from posix import _exit as done\ndone(0)\n",
        "a patch reaches for the test runner: textkit/__init__.py: from posix import _exit",
    ),
    "turns failures into passes": (
        "import _pytest.reports as r\nmake = r.TestReport.from_item_and_call.__func__\ndef always(cls, item, call):\n"
        "    call.excinfo = None\n    return make(cls, item, call)\n"
        "r.TestReport.from_item_and_call = classmethod(always)\n",
        "a patch reaches for the test runner: textkit/__init__.py: import _pytest.reports as r",
    ),
}


@pytest.mark.parametrize(("code", "note"), CHEATS.values(), ids=CHEATS.keys())
def test_code_that_cheats_its_test_run_earns_nothing(
    pair: PairTask, task: PreparedTask, make_patch: MakePatch, code: str, note: str
) -> None:
    before = (task.base / "textkit" / "__init__.py").read_text()
    grade = grade_pair(pair, task, make_patch(task, {"textkit/__init__.py": code + before}), "")
    assert [f.passed for f in grade.features] == [True, True], "the package's own reading must be fooled"
    assert grade.reward == 0.0 and all(note in f.note for f in grade.features)


@pytest.mark.xfail(
    strict=True,
    raises=pytest.fail.Exception,
    reason="known limit: code under test shares its process with the test runner (docs/tasks.md)",
)
def test_code_that_changes_the_runner_in_memory_under_a_hidden_name_earns_nothing(
    pair: PairTask, task: PreparedTask, make_patch: MakePatch
) -> None:
    """What the third cheat above does, with the runner's name put together at run time: no file and no name tells of it."""
    code = CHEATS["turns failures into passes"][0].replace(
        "import _pytest.reports as r", "import importlib\nr = importlib.import_module('_py' + 'test.reports')"
    )
    before = (task.base / "textkit" / "__init__.py").read_text()
    grade = grade_pair(pair, task, make_patch(task, {"textkit/__init__.py": code + before}), "")
    assert [f.passed for f in grade.features] == [True, True], "the package's own reading must be fooled"
    if grade.reward:
        pytest.fail(f"a cheat earns {grade.reward}")


def test_a_deep_tree_is_no_fault(
    pair: PairTask, task: PreparedTask, make_patch: MakePatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise code could void its own grade: in the patch, and while its tests run."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("OPSD_TMP", str(place))
    path = "a/" * 1500 + "f.txt"
    patch = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
    code = "import os\nhere = os.getcwd()\nos.chdir('/patches')\n"
    code += "for _ in range(1500):\n    os.mkdir('d' * 100)\n    os.chdir('d' * 100)\nos.chdir(here)\n"
    before = (task.base / "textkit" / "__init__.py").read_text()
    patch += make_patch(task, {"textkit/__init__.py": code + before}, gold(pair, 1))
    assert grade_pair(pair, task, patch, gold(pair, 2)).reward == 1.0
    assert list(place.iterdir()) == []


def test_a_printed_summary_is_not_a_test_run(pair: PairTask, task: PreparedTask, make_patch: MakePatch) -> None:
    code = "import os, sys\nprint('99 passed')\nsys.stdout.flush()\nos._exit(0)\n"
    assert passed(grade_pair(pair, task, make_patch(task, {"textkit/__init__.py": code}), "")) == [False, False]


def test_the_grader_does_not_see_the_dataset(pair: PairTask, task: PreparedTask) -> None:
    with grading_sandbox(task, pair.dataset_dir, {}, backend="bubblewrap", allow_unsafe=False, timeout_s=30) as box:
        assert box.exec("ls", str(pair.dataset_dir / pair.repo)).returncode != 0
        assert box.exec("bash", "-c", "ls /patches").output == ""
        assert box.exec("bash", "-c", f"echo x >> {task.runner}; echo x >> /usr/local/bin/runner.sh").returncode != 0


class FailingSandbox:
    """A sandbox that fails at its n-th command, by a fault or by a timeout, and is real before."""

    def __init__(self, real: Any, fails_at: int | None, how: str, commands: list[str]):
        self.real, self.spec, self.fails_at, self.how = real, real.spec, fails_at, how
        self.commands = commands  # of all sandboxes of a grading

    def run(self, argv: Any, **kwargs: Any) -> CommandResult:
        self.commands.append(argv[-1])
        if len(self.commands) - 1 != self.fails_at:
            return self.real.run(argv, **kwargs)
        if self.how == "timeout":
            return CommandResult(124, b"", True, False, 1.0)
        raise InfraFault("sandbox_died", "killed", "rule", "way out")

    def close(self) -> None:
        self.real.close()


@pytest.mark.parametrize(("how", "kind"), [("fault", "grader_died"), ("timeout", "grader_timeout")])
def test_a_fault_at_any_step_is_a_fault_and_no_grade(
    pair: PairTask, task: PreparedTask, monkeypatch: pytest.MonkeyPatch, how: str, kind: str
) -> None:
    made: list[FailingSandbox] = []
    real = sandboxes.make_sandbox

    def grade(fails_at: int | None) -> Grade:
        commands: list[str] = []

        def make(*args: Any, **kwargs: Any) -> FailingSandbox:
            made.append(FailingSandbox(real(*args, **kwargs), fails_at, how, commands))
            return made[-1]

        monkeypatch.setattr(sandboxes, "make_sandbox", make)
        return grade_pair(pair, task, gold(pair, 1), gold(pair, 2))

    assert grade(None).reward == 1.0
    steps = len(made[0].commands)
    assert steps >= 5
    for step in range(steps):
        if how == "timeout" and "runner.sh" in made[0].commands[step]:
            assert passed(grade(step)).count(False) == 1  # a test run that hangs is the code's doing
            continue
        with pytest.raises(InfraFault) as caught:
            grade(step)
        assert caught.value.kind == kind
    assert all(box.real._closed for box in made)


def test_a_sandbox_that_does_not_start_is_a_fault(pair: PairTask, task: PreparedTask, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any, **__: Any) -> None:
        raise InfraFault("sandbox_unreachable", "no", "rule", "way out")

    monkeypatch.setattr(sandboxes, "make_sandbox", make)
    with pytest.raises(InfraFault) as caught:
        grade_pair(pair, task, "", "")
    assert caught.value.kind == "grader_died"


def test_another_interpreter_than_the_prepared_one_is_a_fault(pair: PairTask, task: PreparedTask) -> None:
    with pytest.raises(InfraFault, match="python is") as caught:
        grade_pair(pair, replace(task, env={**task.env, "PATH": "/usr/local/bin:/usr/bin:/bin"}), "", "")
    assert caught.value.kind == "grader_died"


def test_a_pair_is_graded_on_its_own_task(pair: PairTask, prepared: dict[str, PreparedTask]) -> None:
    with pytest.raises(OpsdError, match="its own task's tree"):
        grade_pair(pair, prepared["ledger"], "", "")


def test_pairs_are_graded_at_the_same_time(pairs: dict[str, PairTask], prepared: dict[str, PreparedTask]) -> None:
    """Same task, same pair and other tasks in threads: every grade is that of its own patches."""
    textkit, ledger = pairs["textkit/1+2"], pairs["ledger/1+2"]
    jobs = [
        (textkit, gold(textkit, 1), gold(textkit, 2), [True, True]),
        (textkit, gold(textkit, 1), "", [True, False]),
        (textkit, "", gold(textkit, 2), [False, True]),
        (ledger, gold(ledger, 1), gold(ledger, 2), [True, True]),
    ]
    barrier = threading.Barrier(len(jobs))

    def grade(job: tuple[PairTask, str, str, list[bool]]) -> list[bool]:
        barrier.wait()
        return passed(grade_pair(job[0], prepared[job[0].repo.split("_")[1]], job[1], job[2]))

    with ThreadPoolExecutor(len(jobs)) as pool:
        assert list(pool.map(grade, jobs)) == [job[3] for job in jobs]


def test_the_packages_own_backends_stay_reachable() -> None:
    from cooperbench.eval.backends.modal import ModalBackend

    assert isinstance(grading._package().get_backend("modal"), ModalBackend)
    with pytest.raises(ValueError, match="Unknown backend"):
        grading._package().get_backend("verl_opsd:gone")
    assert grading._package().get_backend._backends == {}


def test_grading_happens_in_the_runs_own_temporary_directory(
    pair: PairTask, task: PreparedTask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is removed however the run ends, also by kill -9."""
    monkeypatch.setenv("OPSD_TMP", str(tmp_path))
    with grading_sandbox(task, pair.dataset_dir, {}, backend="process", allow_unsafe=True, timeout_s=30):
        assert [p.name.startswith("opsd-grade-") for p in tmp_path.iterdir()] == [True]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_behind(pair: PairTask, task: PreparedTask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    grade_pair(pair, task, gold(pair, 1), gold(pair, 2))
    assert list(tmp_path.iterdir()) == []
    assert not (task.base / "conftest.py").exists() and (task.base / ".git" / "HEAD").read_text() == "ref: refs/heads/main\n"
