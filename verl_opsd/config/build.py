"""Frozen dataclasses from plain values: unknown keys and wrong types are refused, nothing is converted with a loss."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, Literal, NoReturn

from verl_opsd.errors import OpsdError


def refuse(what: str, rule: str, way_out: str) -> NoReturn:
    """Raises:
    OpsdError: always.
    """
    raise OpsdError(what, rule, way_out)


def build_section(cls: type, values: Any, where: str) -> Any:
    """A frozen dataclass of a section from plain values.

    Raises:
        OpsdError: an unknown or missing key, or a value of the wrong type.
    """
    if not isinstance(values, dict):
        raise OpsdError(f"{where}={values!r}", f"{where} is a group of keys", f"give {where} as key: value pairs")
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise OpsdError(
            f"unknown key {', '.join(f'{where}.{k}' for k in unknown)}",
            f"the keys of {where} are {', '.join(sorted(known))}",
            "correct the spelling or remove the key",
        )
    missing = [
        n
        for n, f in known.items()
        if n not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise OpsdError(
            f"{', '.join(f'{where}.{k}' for k in missing)} not set", "these keys have no default", "set them in the recipe"
        )
    return cls(**{k: _value(hints[k], v, f"{where}.{k}") for k, v in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """``value`` as ``hint``; only lossless conversions (int to float, list to tuple) are made."""
    if dataclasses.is_dataclass(hint):
        return build_section(typing.cast(type, hint), value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _value(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value in args:
            return value
        raise OpsdError(f"{where}={value!r}", f"{where} is one of {', '.join(map(str, args))}", "choose one of them")
    if origin is dict and isinstance(value, dict):
        return {str(k): _value(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(args[0], v, where) for v in value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if (
        hint is not float
        and isinstance(hint, type)
        and isinstance(value, hint)
        and not (hint is int and isinstance(value, bool))
    ):
        return value
    name = getattr(hint, "__name__", str(hint))
    raise OpsdError(
        f"{where}={value!r}", f"{where} is of type {name}{', finite' if hint is float else ''}", f"give a value of type {name}"
    )
