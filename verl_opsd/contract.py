"""The evaluation contract: everything that decides a score, frozen and hashed.

Collection, training, evaluation and resumption run under one contract. Its hash is stamped on every turn, episode and report,
and artefacts of different contracts are never mixed; a comparison may declare the one field that it varies.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from verl_opsd.errors import OpsdError

SCHEMA = 2

Thinking = Literal["keep", "strip"]

#: Fields that no configuration sets: they are found out when a run starts.
FOUND = ("harness", "templates_hash", "tokenizer_hash", "dataset_hash", "subset_hash", "serving", "sandbox_traits")


@dataclass(frozen=True)
class EvalContract:
    """One frozen set of rules under which agents act and are graded.

    Attributes:
        step_limit: model calls an agent may make, >= 1 (0, "unlimited" in the harness, is refused).
        command_timeout_s: seconds one shell command may run before its process tree is killed.
        wall_limit_s: seconds one agent may take in all.
        cost_limit: dollars one agent may spend on model calls; 0 is none, which is what a model that is served here costs.
        max_tokens: new tokens a model call may produce.
        context_length: tokens of prompt plus reply that a call may hold.
        temperature, top_p, top_k: sampling; ``top_k=-1`` means no limit.
        compaction: whether the harness summarises a long history; ``compaction_trigger`` is in prompt tokens.
        thinking: whether reasoning of earlier turns stays in the prompt (``keep``, append-only) or is taken out once a user
            message follows it (``strip``).
        tool_parser: name of the parser that turns reply tokens into tool calls.
        reasoning_parser: how reasoning is told from the rest of a reply: ``think_tags``.
        concurrency: pairs that run at once.
        messaging, git: whether agents can message each other and share a git remote.
        sandbox: backend that runs the agents' commands.
        grader: policy that turns patches into a grade.
        grade_timeout_s: seconds one run of hidden tests may take.
        harness: name, version and tree hash of the harness that runs.
        templates_hash: SHA-256 of the harness' prompt templates.
        tokenizer_hash: SHA-256 of the tokenizer's entries, special tokens and chat template.
        dataset_hash: SHA-256 of the task files that the run may touch.
        subset_hash: SHA-256 of the pairs that the run may touch, each with its split.
        serving: rollout engine, its version, its layout and the device it runs on.
        sandbox_traits: how the backend treats background processes, network and environment, and its resource limits.
    """

    step_limit: int = 200
    command_timeout_s: float = 300.0
    wall_limit_s: float = 3600.0
    cost_limit: float = 0.0
    max_tokens: int = 4096
    context_length: int = 65536
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    compaction: bool = False
    compaction_trigger: int = 28000
    thinking: Thinking = "keep"
    tool_parser: str = "hermes"
    reasoning_parser: str = "think_tags"
    concurrency: int = 4
    messaging: bool = True
    git: bool = True
    sandbox: str = "bubblewrap"
    grader: str = "merged-tree"
    grade_timeout_s: float = 300.0
    harness: str = ""
    templates_hash: str = ""
    tokenizer_hash: str = ""
    dataset_hash: str = ""
    subset_hash: str = ""
    serving: str = ""
    sandbox_traits: str = ""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, kind = getattr(self, f.name), {"int": int, "float": float, "bool": bool}.get(str(f.type), str)
            if kind is float and type(value) is int:  # 1 and 1.0 are one rule, and have one hash
                object.__setattr__(self, f.name, value := float(value))
            if type(value) is not kind or (type(value) is float and not math.isfinite(value)):
                finite = ", finite" if kind is float else ""
                raise OpsdError(f"contract.{f.name}={value!r}", f"{f.name} is of type {kind.__name__}{finite}", "correct it")
        if self.thinking not in get_args(Thinking):
            raise OpsdError(f"contract.thinking={self.thinking!r}", f"it is one of {get_args(Thinking)}", "choose one")
        positive = (
            "step_limit",
            "command_timeout_s",
            "wall_limit_s",
            "max_tokens",
            "context_length",
            "compaction_trigger",
            "concurrency",
            "grade_timeout_s",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise OpsdError(
                    f"contract.{name}={getattr(self, name)!r}",
                    f"{name} is a limit and must be above 0; unlimited runs are not comparable with anything",
                    f"set it to the value that evaluation uses; the default is {getattr(type(self), name)}",
                )
        if self.max_tokens >= self.context_length:
            raise OpsdError(
                f"contract.max_tokens={self.max_tokens} with contract.context_length={self.context_length}",
                "a reply must fit into the context together with its prompt",
                "lower contract.max_tokens or raise contract.context_length",
            )
        if self.cost_limit < 0:
            raise OpsdError(f"contract.cost_limit={self.cost_limit}", "dollars are not negative", "leave it at 0: no limit")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or (self.top_k != -1 and self.top_k < 1):
            raise OpsdError(
                f"contract sampling temperature={self.temperature} top_p={self.top_p} top_k={self.top_k}",
                "temperature >= 0, 0 < top_p <= 1, top_k = -1 (no limit) or >= 1",
                "correct the sampling fields of the contract",
            )

    @property
    def sampling(self) -> str:
        """What replies are drawn from, in words; empty where that is the model's whole distribution at temperature 1, of which divergences
        are measured."""
        cut = [
            f"{k}={v:g}"
            for k, v, plain in (("temperature", self.temperature, 1), ("top_p", self.top_p, 1), ("top_k", self.top_k, -1))
            if v != plain
        ]
        if not cut:
            return ""
        return f"replies are sampled at {' '.join(cut)}; divergences are measured at temperature 1 over the whole distribution"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, in the order of the fields."""
        return dataclasses.asdict(self)

    @property
    def hash(self) -> str:
        """SHA-256 (64 hex digits) of the canonical JSON of all fields."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EvalContract:
        """Builds a contract that was stored whole; a default never stands in for a field that was not recorded.

        Raises:
            OpsdError: a key is not a field of this version of the contract, or a field is missing.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        unknown, missing = sorted(set(values) - known), sorted(known - set(values))
        if unknown or missing:
            raise OpsdError(
                f"a contract of schema {values.get('schema')} with unknown fields {unknown}, without {missing}",
                f"a contract of schema {SCHEMA} has the fields {sorted(known)}",
                "read it with the version that wrote it, or collect again",
            )
        return cls(**values)

    def diff(self, other: EvalContract) -> dict[str, tuple[Any, Any]]:
        """Fields that differ: name -> (value here, value there)."""
        mine, theirs = self.as_dict(), other.as_dict()
        return {k: (mine[k], theirs[k]) for k in mine if mine[k] != theirs[k]}

    def require_same(
        self, other: EvalContract, what: str, varies: str | None = None, without: Sequence[str] = (), mine: str = "this run"
    ) -> None:
        """Refuses to mix artefacts of two contracts, showing the difference field by field.

        Args:
            what: names the artefact of ``other``. mine: that of this contract.
            varies: the one field in which the two are declared to differ.
            without: fields that say nothing about this artefact.

        Raises:
            OpsdError: any other field differs, or ``varies`` is no field of the contract.
        """
        if varies is not None and varies not in self.as_dict():
            raise OpsdError(
                f"a comparison that varies {varies!r}",
                f"it varies one field of the contract: {', '.join(self.as_dict())}",
                "name one of them",
            )
        different = {k: v for k, v in self.diff(other).items() if k != varies and k not in without}
        if different:
            lines = "; ".join(f"{k}: {theirs!r} there, {ours!r} here" for k, (ours, theirs) in different.items())
            declared = "" if varies is None else f" (only {varies} was declared to vary)"
            raise OpsdError(
                f"{what} was made under another contract than {mine} ({lines})",
                f"collection, training and evaluation share one contract{declared}",
                "make it again under this contract, run with the contract of the artefact, or declare the one field that a "
                "comparison varies (opsd.varies, or --varies of a command)",
            )
