"""A TRL that verl can't use is refused at the start; one that it can use, and none, are not."""

from __future__ import annotations

import pytest

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.requirements import check_trl


@pytest.fixture
def trl(tmp_path, monkeypatch):
    """``trl({file: text})`` makes the files of an importable package of that name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(files: dict[str, str]) -> None:
        for name, text in {"trl-9.8.7.dist-info/METADATA": "Name: trl\nVersion: 9.8.7\n", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return make


def test_none():
    check_trl()


@pytest.mark.parametrize(
    "files",
    [
        {"trl/__init__.py": "", "trl/experimental/ppo/__init__.py": ""},
        {"trl/__init__.py": "from .models import AutoModelForCausalLMWithValueHead"},
    ],
)
def test_usable(trl, files):
    trl(files)
    check_trl()


def test_without_the_class(trl):
    trl({"trl/__init__.py": "raise SystemExit('imported')", "trl/experimental/gkd/__init__.py": ""})
    with pytest.raises(OpsdError, match=r"TRL 9\.8\.7 .* has no AutoModelForCausalLMWithValueHead"):
        check_trl()
