"""The serving manifest of an endpoint: what decides its replies and can't be seen from outside."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError


@dataclass(frozen=True)
class Manifest:
    """What serves a model, as its operator says.

    Attributes:
        engine: server and version. layout: devices and parallel sizes. dtype: of the weights.
        tool_parser, reasoning_parser: names as the server's; must be the contract's.
        context_length: tokens that a request may hold. max_num_seqs: requests at once.
        parameters, active_parameters: of the model. prices: cost of a million prompt and a million reply tokens.
    """

    engine: str
    layout: str
    dtype: str
    tool_parser: str
    reasoning_parser: str
    context_length: int
    max_num_seqs: int
    parameters: int | None = None
    active_parameters: int | None = None
    prices: tuple[float, float] | None = None

    def serving(self) -> dict[str, str]:
        """What decides replies, as text, for tables and the contract."""
        names = ("engine", "layout", "dtype", "tool_parser", "reasoning_parser", "context_length", "max_num_seqs")
        return {name: str(getattr(self, name)) for name in names}


_COUNTS = ("context_length", "max_num_seqs", "parameters", "active_parameters")


def _fits(name: str, value: Any, optional: bool) -> bool:
    def number(x: Any, kind: Any, least: int) -> bool:
        return isinstance(x, kind) and not isinstance(x, bool) and bool(least <= x < float("inf"))

    if value is None:
        return optional
    if name in _COUNTS:
        return number(value, int, 1)
    if name == "prices":
        return isinstance(value, list) and len(value) == 2 and all(number(x, (int, float), 0) for x in value)
    return isinstance(value, str)


def read_manifest(path: Path, contract: EvalContract) -> Manifest:
    """A manifest from its YAML file, checked against the contract.

    Raises:
        OpsdError: no such file, an unknown or missing key, a value that can't be one, or a server that can't keep the contract.
    """
    try:
        values: Any = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise OpsdError(f"{path}: {e}", "a serving manifest is a YAML file", "name the file") from e
    fields = {f.name: f for f in dataclasses.fields(Manifest)}
    needed = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    given = set(values) if isinstance(values, dict) else set()
    if not needed <= given or not given <= set(fields):
        raise OpsdError(
            f"{path}: missing {sorted(needed - given)}, unknown {sorted(given - set(fields))}",
            f"a manifest has {', '.join(sorted(needed))}, and may have {', '.join(sorted(set(fields) - needed))}",
            "correct the file",
        )
    wrong = [n for n, v in values.items() if not _fits(n, v, optional=n not in needed)]
    if wrong:
        raise OpsdError(
            f"{path}: {', '.join(f'{n}={values[n]!r}' for n in wrong)}",
            f"{', '.join(_COUNTS)} are whole numbers above 0, prices two numbers, the others text",
            "correct the file",
        )
    manifest = Manifest(**{**values, "prices": tuple(values["prices"]) if values.get("prices") else None})
    rules = (
        (manifest.context_length >= contract.context_length, "context_length", "at least the contract's"),
        (manifest.max_num_seqs >= 2 * contract.concurrency, "max_num_seqs", "at least two a pair that runs at once"),
        (manifest.tool_parser == contract.tool_parser, "tool_parser", "the contract's"),
        (manifest.reasoning_parser == contract.reasoning_parser, "reasoning_parser", "the contract's"),
    )
    for holds, name, rule in rules:
        if not holds:
            raise OpsdError(
                f"{path}: {name}={getattr(manifest, name)} under a contract with tool_parser={contract.tool_parser}, "
                f"reasoning_parser={contract.reasoning_parser}, context_length={contract.context_length}, "
                f"concurrency={contract.concurrency}",
                f"{name} of the server is {rule}",
                "serve the model as the contract says, or choose the contract that it is served under",
            )
    return manifest
