"""A built corpus of two recorded pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import call, episode, rendering, run_dir

from verl_opsd.cooperbench.dataset import POCKET_DIR
from verl_opsd.corpus.build import build
from verl_opsd.corpus.contamination import evaluated, subsets_named
from verl_opsd.corpus.select import Spec, open_sources


@pytest.fixture(scope="session")
def target():
    return evaluated(subsets_named(POCKET_DIR, ["pocket_eval"]))


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a``: both features pass; ``b``: only the second does, whose agent first wrote a reply without a call."""
    a = episode("a", [call("ls -l", "I look."), call("git push")], [call("cat x.py"), call("echo done é")])
    b = episode("b", [call("false")], ["I think first.", call("sed -i s/a/b/ y.py"), call("git commit -qm z")], (False, True))
    return run_dir(tmp_path_factory.mktemp("runs") / "run", a, b)


@pytest.fixture
def corpus(run: Path, tmp_path: Path, target) -> Path:
    """The corpus of that run; a folder of this test's own."""
    build(open_sources([run]), Spec(validation=0.0), rendering(), target, tmp_path / "corpus", "model", "pocket")
    return tmp_path / "corpus"
