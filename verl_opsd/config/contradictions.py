"""Keys of the `opsd` section that contradict one another; each is refused with the key to set instead."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import TYPE_CHECKING

from verl_opsd.config.build import refuse
from verl_opsd.config.loss import LossConfig
from verl_opsd.config.loss_contradictions import check_loss
from verl_opsd.config.sections import ActorBriefConfig, EvaluationConfig
from verl_opsd.config.teacher import teacher_contradictions
from verl_opsd.contract import FOUND, SCHEMA, EvalContract

if TYPE_CHECKING:
    from verl_opsd.config.opsd import OpsdConfig

#: Keys that are counts when they are given, with the least value of each.
LEAST = {
    "threads": 1,
    "tasks.max_train": 1,
    "tasks.max_eval": 1,
    "brief.max_view_tokens": 1,
    "loss.max_prefix": 1,
    "sandbox.graders": 1,
}


def check_sections(c: OpsdConfig) -> None:
    """Raises:
    OpsdError: the first contradiction.
    """
    teacher_contradictions(c.teacher, c.loss)
    _check_briefs(c)
    _check_window(c)
    _check_mode(c)
    _check_activations(c)
    _check_canary(c)
    _check_sandbox(c)
    _check_numbers(c)
    check_loss(c)
    _check_contract(c)


def _check_briefs(c: OpsdConfig) -> None:
    for where, brief in (("brief", c.brief), ("actor_brief", c.actor_brief)):
        if ("workflow" in brief.name.split("+")) != bool(brief.files):
            refuse(
                f"opsd.{where}.name={brief.name} with opsd.{where}.files={brief.files}",
                "the brief `workflow`, and no other, is read from files, one a pair",
                "name the folder of the workflows, or remove the key",
            )
    if c.actor_brief.name == "none" and c.actor_brief != ActorBriefConfig():
        refuse(
            f"opsd.actor_brief={c.actor_brief}",
            "without a brief its other keys would be ignored",
            "name a brief, or leave them out",
        )
    if c.mode == "offline" and c.actor_brief.where != "eval":
        refuse(
            f"opsd.actor_brief.where={c.actor_brief.where} with mode=offline",
            "an offline run collects nothing; what its corpus was collected with is read from there",
            "use where=eval",
        )


def _check_window(c: OpsdConfig) -> None:
    window, context, limit = c.brief.too_long == "window", c.brief.window_context, c.brief.max_view_tokens
    if (context is not None) != window or (context is not None and not 0 <= context < (limit or math.inf)):
        refuse(
            f"opsd.brief.too_long={c.brief.too_long} window_context={context} max_view_tokens={limit}",
            "too_long=window, and nothing else, needs window_context: tokens from 0 up to less than a view may have",
            "set both keys, e.g. window_context to a quarter of max_view_tokens, or leave both out",
        )


def _check_mode(c: OpsdConfig) -> None:
    if c.tasks.look is not None and (c.tasks.test is None or len(c.tasks.look.split()) < 3):
        refuse(
            f"opsd.tasks.look={c.tasks.look!r} with opsd.tasks.test={c.tasks.test}",
            "a look at the locked test split is recorded with its reason",
            "name the split in opsd.tasks.test, and give the reason in a few words",
        )
    evaluates = c.mode == "evaluate"
    if evaluates != (c.tasks.train is None):
        refuse(
            f"opsd.tasks.train={c.tasks.train} with opsd.mode={c.mode}",
            "training has training pairs, and an evaluation would ignore them",
            "set opsd.tasks.train for training, and leave it out of +recipe=full_eval",
        )
    if not evaluates and c.evaluation != EvaluationConfig():
        refuse(f"opsd.evaluation with opsd.mode={c.mode}", "only +recipe=full_eval reads these keys", "leave them out")
    if c.evaluation.seeds < 1 or c.evaluation.retries < 0:
        refuse(f"opsd.evaluation {c.evaluation}", "seeds >= 1 and retries >= 0", "correct the value")
    if evaluates:
        _check_nothing_is_distilled(c)


def _check_nothing_is_distilled(c: OpsdConfig) -> None:
    ignored = {"brief": (c.brief.name, "none"), "teacher": (c.teacher.kind, "self")}
    given = [f"{group}={value}" for group, (value, usual) in ignored.items() if value != usual]
    given += [
        f"opsd.loss.{f.name}"
        for f in dataclasses.fields(LossConfig)
        if getattr(c.loss, f.name) != getattr(LossConfig(), f.name)
    ]
    if given:
        refuse(
            f"{', '.join(given)} with {c.recipe}",
            "an evaluation has no teacher and no loss; what the agents themselves read is opsd.actor_brief",
            "leave them out, or set opsd.actor_brief.name",
        )


def _check_activations(c: OpsdConfig) -> None:
    a = c.activations
    if a.keep == "verl" and a.offload is not None:
        refuse(
            f"opsd.activations.offload={a.offload} with opsd.activations.keep=verl",
            "verl's own checkpointing keeps a layer's input where the layer is",
            "set opsd.activations.keep=none, a kind of layers, or auto",
        )
    if a.device_gb is not None and (a.keep != "auto" or a.device_gb <= 0):
        refuse(
            f"opsd.activations.device_gb={a.device_gb} with opsd.activations.keep={a.keep}",
            "auto, and nothing else, reads it: a device's memory in GB, above 0",
            "set opsd.activations.keep=auto, or leave it out",
        )


def _check_canary(c: OpsdConfig) -> None:
    if c.canary.every is None and c.canary.limits is not None:
        refuse(
            f"opsd.canary.limits={c.canary.limits} without opsd.canary.every",
            "no check would read them",
            "set opsd.canary.every",
        )
    if c.canary.every is not None and (c.canary.every < 1 or c.mode != "online"):
        refuse(
            f"opsd.canary.every={c.canary.every} with opsd.mode={c.mode}",
            "a check is of the episodes that a round collects, every 1 or more rounds",
            "use it with +recipe=opd; otherwise evaluate checkpoints with +recipe=full_eval",
        )


def _check_sandbox(c: OpsdConfig) -> None:
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


def _check_numbers(c: OpsdConfig) -> None:
    if c.worth.override is not None and len(c.worth.override.split()) < 3:
        refuse(f"opsd.worth.override={c.worth.override!r}", "an override is recorded with its reason", "give it in a few words")
    for name, least in LEAST.items():
        value = operator.attrgetter(name)(c)
        if value is not None and value < least:
            refuse(f"opsd.{name}={value}", f"{name} is at least {least}, or null", "correct the value")
    if min(dataclasses.astuple(c.gates)) < 0:
        refuse(f"opsd.gates {c.gates}", "thresholds are not negative", "correct the value")
    if c.gates.publish_late_tokens < 128:
        refuse(
            f"opsd.gates.publish_late_tokens={c.gates.publish_late_tokens}",
            "the last 64 positions of a sequence are compared, which are late in none of fewer than 128 tokens",
            "raise it, or leave it out",
        )
    for key in dataclasses.fields(c.budget):
        value = getattr(c.budget, key.name)
        if value is not None and (value < 0 or (value == 0 and key.name == "minutes_per_pair")):
            refuse(
                f"opsd.budget.{key.name}={value}", "minutes are above 0, prices and limits not negative", "correct the value"
            )


def check_given(contract: EvalContract) -> None:
    """Of a contract that a user gives, before what is found out at the start is filled in.

    Raises:
        OpsdError: a field has a value that nothing here would follow.
    """
    found = {name: getattr(contract, name) for name in FOUND if getattr(contract, name)}
    fixed = {"grader": "merged-tree", "reasoning_parser": "think_tags", "cost_limit": 0.0, "schema": SCHEMA}
    other = {name: getattr(contract, name) for name, value in fixed.items() if getattr(contract, name) != value}
    if found or other:
        refuse(
            "".join(f"opsd.contract.{k}={v} " for k, v in {**other, **found}.items()).rstrip(),
            f"{', '.join(f'{k} is {v}' for k, v in fixed.items())}; {', '.join(FOUND)} are found out at the start",
            "leave these fields out",
        )


def _check_contract(c: OpsdConfig) -> None:
    check_given(c.contract)
    if c.varies is not None and (c.varies not in c.contract.as_dict() or c.varies == "schema"):
        refuse(
            f"opsd.varies={c.varies}",
            f"a comparison varies one field of the contract: {', '.join(c.contract.as_dict())}",
            "name one of them, or leave it out",
        )
