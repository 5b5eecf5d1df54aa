"""The `opsd` section of the configuration: frozen dataclasses, unknown keys and contradictions are refused."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError


@dataclass(frozen=True)
class TasksConfig:
    """Which pairs are trained on and which are evaluated.

    Attributes:
        dataset: ``pocket`` (ships with the package) or a folder in CooperBench's layout.
        train, eval: names or paths of subsets.
        prepare: prepare and qualify missing tasks before the run; only for ``pocket``, where it takes seconds.
        disjoint: what training and evaluation must not share: ``repo`` or ``task``.
        max_train, max_eval: the first pairs of a subset only; null takes all.
    """

    dataset: str
    train: str
    eval: str
    prepare: bool = False
    disjoint: Literal["repo", "task"] = "repo"
    max_train: int | None = None
    max_eval: int | None = None


@dataclass(frozen=True)
class BriefConfig:
    """The teacher's privileged context and where it stands in the teacher's view."""

    name: str
    placement: Literal["system", "last_user"] = "system"
    user_turn: Literal["block", "message"] = "block"
    allow_answer: bool = False
    max_view_tokens: int | None = None


@dataclass(frozen=True)
class TeacherConfig:
    """Who re-scores the student's tokens.

    ``self``: the student's own base (LoRA adapter off, or the initial weights in full-parameter training).
    ``device``: another model at ``path`` in its own workers (``devices`` of them, each holding the whole model).
    """

    kind: Literal["self", "device"] = "self"
    path: str | None = None
    devices: int = 1
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class LossConfig:
    """The objective. ``anchor`` is the weight of the divergence to the student's own base; 0 turns it off."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd", "skewed_kl"] = "reverse_kl"
    beta: float | None = None
    reduction: Literal["token", "turn", "branch", "episode"] = "token"
    anchor: float = 0.0
    turn_kinds: tuple[str, ...] = ("policy", "malformed")
    chunk: int = 1024
    epochs: int = 1
    episodes_per_update: int | None = None


@dataclass(frozen=True)
class GatesConfig:
    """Thresholds written down before the run; all fail closed. Divergences in nats a token, means over loss positions."""

    identity_max: float = 1e-6
    shifted_min: float = 1e-3
    publish_kl_max: float = 1e-6


@dataclass(frozen=True)
class SandboxConfig:
    """Where agents' commands and hidden tests run. ``allow_unsafe`` permits ``process``, which isolates nothing."""

    backend: Literal["bubblewrap", "process"] = "bubblewrap"
    allow_unsafe: bool = False
    grade_timeout_s: float = 300.0


@dataclass(frozen=True)
class OpsdConfig:
    """The whole section."""

    recipe: str
    scale: str
    mode: Literal["online", "offline", "eval"]
    tasks: TasksConfig
    brief: BriefConfig
    teacher: TeacherConfig
    loss: LossConfig
    contract: EvalContract
    gates: GatesConfig = field(default_factory=GatesConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    student: Literal["", "tiny", "smollm"] = ""
    corpus: str | None = None

    @classmethod
    def parse(cls, values: dict[str, Any]) -> OpsdConfig:
        """Builds the section from plain values.

        Raises:
            OpsdError: an unknown or missing key, a value of the wrong type, or two keys that contradict each other.
        """
        config = _build(cls, values, "opsd")
        _contradictions(config)
        return config


def _build(cls: type, values: Any, where: str) -> Any:
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
        return _build(typing.cast(type, hint), value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _value(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value in args:
            return value
        raise OpsdError(f"{where}={value!r}", f"{where} is one of {', '.join(map(str, args))}", "choose one of them")
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(args[0], v, where) for v in value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    name = getattr(hint, "__name__", str(hint))
    raise OpsdError(f"{where}={value!r}", f"{where} is of type {name}", f"give a value of type {name}")


def _contradictions(c: OpsdConfig) -> None:
    def refuse(what: str, rule: str, way_out: str) -> None:
        raise OpsdError(what, rule, way_out)

    if c.teacher.kind == "device" and not c.teacher.path:
        refuse("opsd.teacher.kind=device without opsd.teacher.path", "a device teacher is another model", "name its path")
    if c.teacher.kind == "self" and c.teacher.path:
        refuse(
            f"opsd.teacher.kind=self with opsd.teacher.path={c.teacher.path}",
            "the self teacher is the student's own base; a path would be ignored",
            "remove the path or use teacher=device",
        )
    if c.sandbox.backend == "process" and not c.sandbox.allow_unsafe:
        refuse(
            "opsd.sandbox.backend=process",
            "plain processes isolate nothing: agents could read the dataset and this host's files",
            "install bubblewrap and use it, or set opsd.sandbox.allow_unsafe=true on a disposable machine",
        )
    if c.contract.sandbox != c.sandbox.backend:
        refuse(
            f"opsd.contract.sandbox={c.contract.sandbox} with opsd.sandbox.backend={c.sandbox.backend}",
            "the sandbox is part of the evaluation contract",
            "set both to the same backend",
        )
    if (c.loss.beta is not None) != (c.loss.divergence in ("jsd", "skewed_kl")):
        refuse(
            f"opsd.loss.divergence={c.loss.divergence} with opsd.loss.beta={c.loss.beta}",
            "beta belongs to jsd and skewed_kl, and they need it",
            "set or remove opsd.loss.beta",
        )
    if c.loss.anchor < 0 or c.loss.epochs < 1 or c.loss.chunk < 1 or (c.loss.episodes_per_update or 1) < 1:
        refuse(
            f"opsd.loss anchor={c.loss.anchor} epochs={c.loss.epochs} chunk={c.loss.chunk} "
            f"episodes_per_update={c.loss.episodes_per_update}",
            "anchor >= 0; epochs, chunk and episodes_per_update >= 1",
            "correct the value",
        )
    if c.contract.thinking == "strip":
        refuse(
            "opsd.contract.thinking=strip",
            "this version sends earlier reasoning unchanged (append-only ids)",
            "use opsd.contract.thinking=keep",
        )
