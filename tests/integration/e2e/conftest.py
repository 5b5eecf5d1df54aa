"""Whole runs of verl's trainer, each shared by the tests that look at it; the environment's cache, or one of the session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from job import SHORT, Job, run_trainer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepared models and tasks: where the environment says, otherwise made once for this session."""
    with pytest.MonkeyPatch.context() as patch:
        if "OPSD_CACHE" not in os.environ:
            patch.setenv("OPSD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def online(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two rounds of two pairs, then the evaluation of one pair."""
    return run_trainer(tmp_path_factory.mktemp("online"), "+recipe=opd", *SHORT)
