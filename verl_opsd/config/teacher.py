"""The `opsd.teacher` section: who re-scores the student's tokens, and which of its keys each kind reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from verl_opsd.config.build import refuse

if TYPE_CHECKING:
    from verl_opsd.config.loss import LossConfig

EXAMPLE = {"path": "MODEL", "url": "http://HOST:8000"}


@dataclass(frozen=True)
class ModelTeacher:
    """A teacher that is another model.

    Attributes:
        path: of ``device``: folder in Hugging Face layout or hub name; of ``server``: the name under which it serves, whose tokenizer and
            config are compared with the student's.
        devices: of ``device``, device slots of its workers. ranks: slots that hold one copy of the model together (FSDP2).
        dtype: of ``device``, weights and compute.
        fp8: of ``device``, file of ``opsd probe --fp8``: matrix products in FP8 (e4m3), where the conditioning signal stands ten times above
            the error that this makes; null: none of that.
        cache: keep its signal on disk, shared by epochs and runs.
        url: of ``server``, e.g. ``http://host:8000``. requests: that may be under way at a time.
    """

    kind: str
    path: str | None = None
    devices: int = 1
    ranks: int = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    fp8: str | None = None
    cache: bool = False
    url: str | None = None
    requests: int = 4


@dataclass(frozen=True)
class MemberConfig(ModelTeacher):
    """One of several teachers.

    Attributes:
        tasks: patterns of ``repo/taskN`` (``*`` for any text); each training task matches patterns of exactly one teacher.
    """

    kind: Literal["device", "server"] = "device"
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class TeacherConfig(ModelTeacher):
    """Who re-scores the student's own tokens.

    ``self``: the student's own base (LoRA adapter off, or the initial weights in full-parameter training).
    ``frozen``: the student as it was when the run started (a warm-started adapter included). ``ema``: the moving average of its weights,
    ``decay`` an optimizer step. ``lagged``: the student as it began the round ``lag`` rounds before.
    ``device``: another model in its own workers. ``server``: another model behind an HTTP server that gives prompt_logprobs; its signal
    has the ``opsd.loss.top_k`` most probable tokens. ``routed``: several of these two, ``members`` by name, each for some tasks.
    """

    kind: Literal["self", "frozen", "ema", "lagged", "device", "server", "routed"] = "self"
    decay: float | None = None
    lag: int | None = None
    members: dict[str, MemberConfig] = field(default_factory=dict)

    @property
    def devices_of_models(self) -> int:
        """Device slots that teachers' workers take beside the student's."""
        models: list[ModelTeacher] = list(self.members.values()) if self.kind == "routed" else [self]
        return sum(m.devices for m in models if m.kind == "device")


def teacher_contradictions(teacher: TeacherConfig, loss: LossConfig) -> None:
    """Keys that a teacher needs, and keys that it does not read.

    Raises:
        OpsdError: the first contradiction.
    """
    blank, kind = ModelTeacher("blank"), teacher.kind
    models: dict[str, ModelTeacher] = {f"opsd.teacher.members.{k}": m for k, m in teacher.members.items()}
    if (kind == "routed") != bool(models):
        refuse(
            f"opsd.teacher.kind={kind} with members {sorted(teacher.members)}",
            "the routed teacher, and no other, is made of members",
            "name members, e.g. +opsd.teacher.members.NAME={kind: device, path: MODEL, tasks: ['*']}, or remove them",
        )
    models["opsd.teacher"] = teacher
    used = {"device": ("path", "devices", "ranks", "dtype", "fp8", "cache"), "server": ("path", "cache", "url", "requests")}
    for where, m in models.items():
        reads = used.get(m.kind, ())
        ignored = [
            k
            for k in ("path", "devices", "ranks", "fp8", "cache", "url", "requests")
            if k not in reads and getattr(m, k) != getattr(blank, k)
        ]
        if ignored:
            refuse(
                f"{where}.kind={m.kind} with {', '.join(f'{where}.{k}={getattr(m, k)}' for k in ignored)}",
                f"the {m.kind} teacher reads {', '.join(reads) or 'none of these keys: it is the student, or several models'}",
                "leave them out, or use teacher=device or teacher=server",
            )
        missing = [k for k in ("path", "url") if k in reads and not getattr(m, k)]
        if missing:
            refuse(
                f"{where}.kind={m.kind} without {', '.join(f'{where}.{k}' for k in missing)}",
                f"a {m.kind} teacher is another model",
                f"name it: {' '.join(f'{where}.{k}={EXAMPLE[k]}' for k in missing)}",
            )
        if m.devices < 1 or m.requests < 1 or m.ranks < 1 or m.devices % m.ranks:
            refuse(
                f"{where}.devices={m.devices} ranks={m.ranks} requests={m.requests}",
                "each is 1 or more, and devices are a multiple of ranks, the devices of one copy of the model",
                "correct the numbers",
            )
        if m.fp8 is not None and (m.dtype != "bfloat16" or m.ranks > 1):
            refuse(
                f"{where}.fp8={m.fp8} with {where}.dtype={m.dtype} ranks={m.ranks}",
                "FP8 takes the place of a bfloat16 teacher's products, on a device that holds it whole",
                f"set {where}.dtype=bfloat16 and ranks=1, or leave {where}.fp8 out",
            )
        wanted = "teacher_topk" if not loss.spec().sampled else "full"
        if m.kind == "server" and loss.support != wanted:
            refuse(
                f"{where}.kind=server with opsd.loss.divergence={loss.divergence} support={loss.support}",
                "a server gives its most probable tokens and the sampled one, not its whole distribution nor tokens that the student names",
                f"set opsd.loss.support={wanted}" + (" and opsd.loss.top_k" if wanted == "teacher_topk" else ""),
            )
    for name, member in teacher.members.items():
        if not member.tasks or name in ("student", "initial"):
            refuse(
                f"opsd.teacher.members.{name} with tasks={list(member.tasks)}",
                "a member has a name of its own and patterns of the tasks that it teaches",
                "give patterns of repo/taskN, e.g. tasks: ['pallets_*']",
            )
    for name, owner, valid in (
        ("decay", "ema", teacher.decay is not None and 0 <= teacher.decay < 1),
        ("lag", "lagged", teacher.lag is not None and teacher.lag >= 1),
    ):
        value = getattr(teacher, name)
        if (value is not None) != (kind == owner) or (kind == owner and not valid):
            refuse(
                f"opsd.teacher.kind={kind} with opsd.teacher.{name}={value}",
                f"{name} belongs to the {owner} teacher: decay in [0, 1) an optimizer step, lag in rounds, 1 or more",
                f"use teacher={owner} opsd.teacher.{name}=NUMBER, or remove the key",
            )
