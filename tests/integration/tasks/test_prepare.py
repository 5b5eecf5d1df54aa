"""Preparation: deterministic, repeatable, concurrent, isolated; and qualification's verdicts on broken tasks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from verl_opsd.cooperbench import prepare as module
from verl_opsd.cooperbench.dataset import POCKET_DIR
from verl_opsd.cooperbench.feature_table import load_table, save_table
from verl_opsd.cooperbench.prepare import ensure_environment, load_prepared, prepare
from verl_opsd.cooperbench.qualification import gold_merge, qualify, require_qualified
from verl_opsd.cooperbench.recipes import Recipe
from verl_opsd.cooperbench.types import PairTask, PreparedTask
from verl_opsd.errors import OpsdError

TEXTKIT = POCKET_DIR / "pocket_textkit_task" / "task0"


def git(*args: str, cwd: Path) -> str:
    return subprocess.run(["git", *args], cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def own_cache(cache: Path, tmp_path: Path) -> Path:
    """An empty cache that shares the environments of the session's."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "venvs").symlink_to(cache / "venvs")
    return tmp_path / "cache"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the textkit task that a test may change."""
    return Path(shutil.copytree(TEXTKIT, tmp_path / "data" / TEXTKIT.parent.name / TEXTKIT.name))


def test_two_caches_hold_the_same_commit_and_hash(prepared: dict[str, PreparedTask], own_cache: Path) -> None:
    first, second = prepared["textkit"], prepare(TEXTKIT, None, own_cache)
    assert first.base != second.base
    assert (first.base_sha, first.tree_hash) == (second.base_sha, second.tree_hash)
    assert git("rev-list", "--all", "--count", cwd=second.base) == "1"
    assert git("rev-parse", "HEAD", cwd=second.base) == second.base_sha
    assert git("status", "--porcelain", "--ignored", cwd=second.base) == ""
    assert git("log", "-1", "--format=%an <%ae> %aI %cI", cwd=second.base) == (
        "base <base@localhost> 2000-01-01T00:00:00+00:00 2000-01-01T00:00:00+00:00"
    )


def test_a_second_preparation_builds_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(TEXTKIT, None, own_cache)
    monkeypatch.setattr(module, "_build", None)
    monkeypatch.setattr(module, "ensure_environment", None)
    assert prepare(TEXTKIT, None, own_cache) == first == load_prepared(own_cache, "pocket_textkit_task", 0)


def test_concurrent_preparations_agree_and_leave_no_partial_folder(own_cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: prepare(TEXTKIT, None, own_cache), range(4)))
    assert made == [made[0]] * 4
    home = own_cache / "tasks" / "pocket_textkit_task" / "task0"
    assert sorted(p.name for p in home.iterdir()) == sorted([made[0].base.parent.name, "current", "lock"])


def test_a_failed_preparation_leaves_nothing_that_looks_done(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(module, "commit_tree", fail)
        with pytest.raises(RuntimeError):
            prepare(TEXTKIT, None, own_cache)
    with pytest.raises(OpsdError, match="opsd tasks prepare"):
        load_prepared(own_cache, "pocket_textkit_task", 0)
    assert prepare(TEXTKIT, None, own_cache).base.is_dir()


@pytest.mark.parametrize("changed", ["base/textkit/wrap.py", "feature1/tests.patch", "feature2/feature.md", "runner.sh"])
def test_any_changed_file_makes_another_preparation_and_keeps_the_first(own_cache: Path, copied: Path, changed: str) -> None:
    first = prepare(copied, None, own_cache)
    with (copied / changed).open("a") as file:
        file.write("\n# changed\n")
    second = prepare(copied, None, own_cache)
    assert second.tree_hash != first.tree_hash and second.base != first.base
    assert (second.base_sha != first.base_sha) == changed.startswith("base/")
    assert first.base.is_dir() and load_prepared(own_cache, "pocket_textkit_task", 0) == second


def test_bytecode_of_an_installation_changes_nothing(own_cache: Path, copied: Path) -> None:
    first = prepare(copied, None, own_cache)
    subprocess.run([sys.executable, "-m", "compileall", "-q", copied], check=True)
    assert list(copied.rglob("*.pyc"))
    assert prepare(copied, None, own_cache) == first


def test_everything_is_readable_by_any_user(own_cache: Path) -> None:
    before = os.umask(0o077)
    try:
        made = prepare(TEXTKIT, None, own_cache)
    finally:
        os.umask(before)
    files = [p for p in made.base.parent.rglob("*") if not p.is_symlink() and ".git" not in p.parts]
    assert files and all(p.stat().st_mode & 0o444 == 0o444 for p in files)


def test_sources_given_by_hand(own_cache: Path, tmp_path: Path, prepared: dict[str, PreparedTask]) -> None:
    """The same files from a clone's commit give the same base commit."""
    clone = Path(shutil.copytree(TEXTKIT / "base", tmp_path / "clone", ignore=shutil.ignore_patterns("__pycache__")))
    git("init", "-q", cwd=clone)
    git("add", "-A", cwd=clone)
    git("-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "x", cwd=clone)
    commit = git("rev-parse", "HEAD", cwd=clone)
    made = prepare(TEXTKIT, f"clone:{clone}@{commit}", own_cache)
    assert made.base_sha == prepared["textkit"].base_sha != commit
    assert subprocess.run(["git", "cat-file", "-e", commit], cwd=made.base, capture_output=True).returncode != 0


def test_environments_are_shared_and_hold_only_the_tests_requirements(prepared: dict[str, PreparedTask]) -> None:
    prefixes = {task.python_prefix for task in prepared.values()}
    assert len(prefixes) == 1
    (prefix,) = prefixes
    assert "pytest==8.4.2" in (prefix / "freeze.txt").read_text()
    code = "import sys, importlib.util as u; print([m for m in sys.argv[1:] if u.find_spec(m)])"
    command = [prefix / "bin" / "python", "-I", "-c", code, "textkit", "torch", "pip", "verl_opsd", "pytest"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['pytest']"


def test_an_environment_with_the_tasks_own_package_is_refused(
    own_cache: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the package of the tree is `pytest` itself."""
    shutil.move(copied / "base" / "textkit", copied / "base" / "pytest")
    with pytest.raises(OpsdError, match=r"holds \['pytest'\]"):
        prepare(copied, None, own_cache)


def test_a_half_made_environment_is_made_again(tmp_path: Path) -> None:
    requirements = ("iniconfig==2.1.0",)
    prefix = ensure_environment(requirements, tmp_path)
    (prefix / "complete").unlink()
    (prefix / "bin" / "python").unlink()
    assert ensure_environment(requirements, tmp_path) == prefix
    assert subprocess.run([prefix / "bin" / "python", "-c", "import iniconfig"]).returncode == 0


def test_what_can_not_be_prepared_is_refused(
    own_cache: Path, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OpsdError, match="is no task folder"):
        prepare(tmp_path / "nothing", None, own_cache)
    with pytest.raises(OpsdError, match="a source is tree:PATH"):
        prepare(copied, "somewhere", own_cache)
    (copied / "runner.sh").write_text("pip install -e .\npytest\n")
    with pytest.raises(OpsdError, match="installs packages"):
        prepare(copied, None, own_cache)
    (copied / "runner.sh").unlink()
    with pytest.raises(OpsdError, match=r"no runner\.sh and no recipe"):
        prepare(copied, None, own_cache)
    shutil.rmtree(copied / "base")
    with pytest.raises(OpsdError, match="where its base tree comes from"):
        prepare(copied, None, own_cache)
    monkeypatch.setattr(module, "recipe_for", lambda *_: Recipe(source="tree:/nowhere", test_command="true"))
    with pytest.raises(OpsdError, match="does not exist"):
        prepare(copied, None, own_cache)


FREE = """\
diff --git a/tests/test_free.py b/tests/test_free.py
new file mode 100644
--- /dev/null
+++ b/tests/test_free.py
@@ -0,0 +1,2 @@
+def test_free():
+    pass
"""


def test_verdicts(own_cache: Path, copied: Path) -> None:
    """Feature 1: its tests pass on the base. Feature 2: its gold patch is broken. Feature 3: measured later."""
    (copied / "feature1" / "tests.patch").write_text(FREE)
    (copied / "feature2" / "feature.patch").write_text("nonsense\n")
    dataset, task = copied.parents[1], (copied.parent.name, 0)
    pairs = [PairTask(dataset, *task, (1, 2)), PairTask(dataset, *task, (2, 3))]
    with pytest.raises(OpsdError, match="not prepared"):
        require_qualified(pairs, own_cache)
    made = prepare(copied, None, own_cache)
    assert load_table(made) is None
    with pytest.raises(OpsdError, match=r"feature 1: not measured; .*feature 2: not measured; .*feature 3: not measured"):
        require_qualified(pairs, own_cache)
    qualify(copied, made, [1, 2])
    with pytest.raises(OpsdError) as caught:
        require_qualified(pairs, own_cache)
    assert caught.value.what == (
        "pocket_textkit_task/task0 feature 1: free_point; pocket_textkit_task/task0 feature 2: gold_fails; "
        "pocket_textkit_task/task0 feature 3: not measured"
    )
    assert f"opsd tasks qualify --dataset {dataset} --repo pocket_textkit_task --task 0" in caught.value.way_out
    table = qualify(copied, made, [3])
    assert {f: row.verdict for f, row in table.rows.items()} == {1: "free_point", 2: "gold_fails", 3: "qualified"}
    assert table.qualified == (3,)
    with pytest.raises(OpsdError, match=r"features \[4\]"):
        qualify(copied, made, [4])
    with pytest.raises(OpsdError, match="git"):
        gold_merge(pairs[0], made)
    save_table(made, replace(table, tree_hash="other"))
    with pytest.raises(OpsdError, match="measured on tree other"):
        load_table(made)
