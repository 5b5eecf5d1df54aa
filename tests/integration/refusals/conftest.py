"""One process composes configurations as verl's command does and calls the Hydra callback, so a refusal costs no start of its own."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from leftovers import leavings


@pytest.fixture
def compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """``compose("+recipe=opd", ...)``: verl's configuration with our search path, and Hydra's own section where asked for."""
    import verl  # noqa: F401  loads the plugin
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("OPSD_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("OPSD_RAY_TMP", str(tmp_path / "ray"))

    def composed(*overrides: str, hydra_section: bool = False) -> object:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return hydra_compose("ppo_trainer", overrides=list(overrides), return_hydra_config=hydra_section)

    return composed


@pytest.fixture
def refused(compose: Callable[..., object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``refused("+recipe=opd", ...)`` composes, calls the callback, expects a refusal that leaves nothing, gives its text."""

    def text_of(*overrides: str, recipe: str = "opd") -> str:
        import ray

        from verl_opsd.verl_adapter.callback import OpsdCallback

        config = compose(f"+recipe={recipe}", *overrides)
        run = tmp_path / "run"
        (run / ".hydra").mkdir(parents=True)  # as Hydra does before it calls callbacks
        (run / "main_ppo.log").write_text("")
        before = leavings()
        with pytest.raises(SystemExit) as stop:
            OpsdCallback().on_job_start(config)
        assert stop.value.code == 2
        assert not run.exists() and leavings() <= before and not ray.is_initialized()
        text = capsys.readouterr().err
        assert re.search(r"^error: .+\n  rule: .+\n  way out: .+", text, re.MULTILINE), text
        assert "Traceback" not in text
        return text

    return text_of
