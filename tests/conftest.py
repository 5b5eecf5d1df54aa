"""Shared fixtures and the rules for slow and GPU tests: skipped with a printed reason unless asked for."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import yaml
from forked import LIBRARIES, Forks
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
# Every composed configuration reads some 40 files; libyaml reads the same in a tenth of the time.
yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc]
# Seconds of a test say nothing on a machine that runs other tests beside it.
settings.register_profile("shared_machine", deadline=None)
settings.load_profile("shared_machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow too")


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Processes with the libraries that verl imports, at a tenth of the price; for tests of what happens in a process of its own."""
    with Forks(LIBRARIES, tmp_path_factory.mktemp("forked")) as server:
        yield server


def pytest_collection_finish() -> None:
    # The collector looks through all modules again and again, a fifth of the time of a test that composes a configuration.
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 300)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; none here"))
