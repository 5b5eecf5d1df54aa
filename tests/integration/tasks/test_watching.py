"""Code that changes what judges it while its tests run: it fools the package's reading and earns nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_opsd.cooperbench.grading import grade_pair
from verl_opsd.cooperbench.types import PairTask, PreparedTask
from verl_opsd.cooperbench.watching import split_runner, touched, watched, without_bytecode

MakePatch = Callable[..., str]

#: Runs ``before()`` and then the whole session again, with its own output; ``after()`` at the end of that session.
AGAIN = """
import atexit, glob, os, shutil, stat, sys
EASY = "".join(f"def test_{n}(): pass\\n" for n in range(99))
STEPS
if "AGAIN" in os.environ:
    atexit.register(after)
else:
    os.environ["AGAIN"] = "1"
    before()
    for fd in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.dup2(fd, 1), os.dup2(fd, 2)
        except OSError:
            pass
    os.execv(sys.executable, sys.orig_argv)
"""
CHEATS = {
    "test files rewritten": """
def before():
    for path in glob.glob("tests/test_*.py"): open(path, "w").write(EASY)
def after(): pass
""",
    "rewritten and put back": """
def before():
    shutil.copytree("tests", "/tmp/kept")
    for path in glob.glob("tests/test_*.py"): open(path, "w").write(EASY)
def after():
    for path in glob.glob("tests/test_*.py"):
        open(path, "w").write(open("/tmp/kept/" + os.path.basename(path)).read())
        kept = os.stat("/tmp/kept/" + os.path.basename(path)); os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
""",
    "another directory for a while": """
def before():
    os.rename("tests", "kept"); os.mkdir("tests"); open("tests/test_easy.py", "w").write(EASY)
def after():
    shutil.rmtree("tests"); os.rename("kept", "tests")
""",
    "bytecode that runs in the place of the test files": """
def before():
    import importlib.metadata, importlib.util, marshal, struct
    tag = f"{sys.implementation.cache_tag}-py" + "test-" + importlib.metadata.version("py" + "test")
    os.makedirs("tests/__pycache__")
    for path in glob.glob("tests/test_*.py"):
        real = os.stat(path)
        head = importlib.util.MAGIC_NUMBER + struct.pack("<LLL", 0, int(real.st_mtime), real.st_size)
        name = f"tests/__pycache__/{os.path.basename(path)[:-3]}.{tag}.pyc"
        open(name, "wb").write(head + marshal.dumps(compile(EASY, path, "exec")))
def after(): pass
""",
    "a conftest that comes and goes": """
def before(): open("tests/conftest.py", "w").write("def py" + "test_pyfunc_call(): return True\\n")
def after(): os.remove("tests/conftest.py")
""",
}


@pytest.mark.parametrize("steps", CHEATS.values(), ids=CHEATS.keys())
def test_code_that_changes_its_tests_earns_nothing(
    pairs: dict[str, PairTask], prepared: dict[str, PreparedTask], make_patch: MakePatch, steps: str
) -> None:
    pair, task = pairs["textkit/1+2"], prepared["textkit"]
    before = (task.base / "textkit" / "__init__.py").read_text()
    patch = make_patch(task, {"textkit/__init__.py": AGAIN.replace("STEPS", steps) + before})
    grade = grade_pair(pair, task, patch, "")
    assert [f.passed for f in grade.features] == [True, True], grade.features[0].output[-3000:]
    assert grade.reward == 0.0
    assert all(f.note.startswith("while its tests ran the code touched 'tests") for f in grade.features)


def test_a_test_run_leaves_nothing_for_the_next(
    pairs: dict[str, PairTask], prepared: dict[str, PreparedTask], make_patch: MakePatch
) -> None:
    """The first run replaces the second feature's hidden tests and git; the second feature is not implemented."""
    pair, task = pairs["textkit/1+2"], prepared["textkit"]
    easy = make_patch(task, {"tests/test_easy.py": "def test_easy(): pass\n"})
    code = f"import os\nos.remove('/patches/tests2.patch')\nopen('/patches/tests2.patch', 'w').write({easy!r})\n"
    code += "open('/workspace/repo/.git/HEAD', 'w').write('gone')\n"
    gold = (pair.task_dir / "feature1" / "feature.patch").read_text()
    before = (task.base / "textkit" / "__init__.py").read_text()
    grade = grade_pair(pair, task, make_patch(task, {"textkit/__init__.py": code + before}, gold), "")
    assert [(f.passed, f.earned) for f in grade.features] == [(True, True), (False, False)]


def test_what_is_watched(tmp_path: Path) -> None:
    """Test files, settings, what the hidden tests name, and their directories; not the library, nor files beside the root's."""
    repo = tmp_path / "repo"
    for path in (
        "lib/core.py",
        "lib/inner/test_core.py",
        "tests/data/x.txt",
        "docs/expected.txt",
        "pyproject.toml",
        ".git/tests",
    ):
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        (repo / path).write_text("1")
    before = watched(tmp_path, b"--- a/docs/expected.txt\n+++ b/docs/expected.txt\n@@\n")
    files = {"lib/inner/test_core.py", "docs/expected.txt", "pyproject.toml"}
    assert set(before) == files | {"tests/data/x.txt", "lib", "lib/inner", "docs", ".."}
    (repo / "lib" / "core.py").write_text("2")
    (repo / "new.txt").write_text("2")
    os.utime(repo / "tests" / "data" / "x.txt")  # as tests of what is loaded again do
    assert touched(tmp_path, before) == ""
    for path in sorted(files):
        (repo / path).write_text("1")
        assert touched(tmp_path, before) == path
        before = watched(tmp_path, b"+++ b/docs/expected.txt\n")
    (repo / "tests" / "data" / "x.txt").write_text("2")
    assert touched(tmp_path, before) == "tests/data/x.txt"
    (repo / "tests" / "data" / "x.txt").write_text("1")
    repo.rename(tmp_path / "other")
    (tmp_path / "other").rename(repo)
    assert touched(tmp_path, before) == ".."


def test_bytecode_is_removed_and_seen(tmp_path: Path) -> None:
    """Of a patch: removed wherever it lies, and nothing else. Of a test run: seen beside tests in the root too."""
    repo = tmp_path / "repo"
    kept = ["test_root.py", "lib/inner/test_core.py", "lib/__pycache__x/a.pyc"]
    for path in (*kept, "__pycache__/test_root.x.pyc", "lib/inner/__pycache__/test_core.x.pyc"):
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        (repo / path).write_text("1")
    (repo / "elsewhere").mkdir()
    (repo / "lib" / "__pycache__").symlink_to(repo / "elsewhere")
    (repo / "elsewhere" / "__pycache__").write_text("a file")
    without_bytecode(tmp_path)
    assert sorted(str(p.relative_to(repo)) for p in repo.rglob("*") if p.is_file() or p.is_symlink()) == sorted(kept)
    assert (repo / "elsewhere").is_dir()
    before = watched(tmp_path, b"")
    assert touched(tmp_path, before) == ""
    (repo / "__pycache__").mkdir()
    assert touched(tmp_path, before) == "__pycache__"
    (repo / "__pycache__").rmdir()
    (repo / "lib" / "inner" / "__pycache__").mkdir()
    assert touched(tmp_path, before) == "lib/inner"


def test_a_runner_of_another_form_is_run_as_it_is() -> None:
    assert split_runner("git apply /patches/$1\npytest\n") == ("git apply /patches/$1\npytest\n",)
    first, second = split_runner('set -e\napply_patch "$1"\n\npytest tests\n')
    assert "pytest" not in first and second.endswith("\npytest tests\n") and "apply" not in second
