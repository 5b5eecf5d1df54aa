"""Before anything starts: a teacher that is another model reads the student's ids as the student does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from verl_opsd.config import OpsdConfig
from verl_opsd.config.teacher import ModelTeacher
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir
from verl_opsd.teachers.cache import model_digest
from verl_opsd.verl_adapter.requirements import check_model_path, tokenizer_of, vocabulary_rows
from verl_opsd.verl_adapter.routes import models_of

_CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yz"}]


def check_teachers(opsd: OpsdConfig, student_path: str) -> None:
    """Every teacher of another model against the student: vocabulary, special tokens, end of a turn, generation prefix, context. A server
    is asked what it can do.

    Raises:
        OpsdError: names teacher, what differs and both values.
        InfraFault: a server that can't be reached.
    """
    for name, model in models_of(opsd).items():
        where = "opsd.teacher" if opsd.teacher.kind != "routed" else f"opsd.teacher.members.{name}"
        assert model.path is not None
        check_model_path(model.path, f"{where}.path")
        if model.fp8 is not None:
            check_fp8(opsd, model.path, model.fp8)
        check_tokens(student_path, model.path, where)
        limit = _limit(opsd, name, model, student_path)
        context = opsd.contract.context_length
        if vocabulary_rows(student_path) != vocabulary_rows(model.path) or (limit is not None and limit < context):
            raise OpsdError(
                f"{where}.path={model.path} with {vocabulary_rows(model.path)} vocabulary rows and a context of {limit} tokens",
                f"the student has {vocabulary_rows(student_path)} rows, and opsd.contract.context_length={context} tokens are scored",
                "choose a teacher of the student's family, or lower the context length",
            )


def check_fp8(opsd: OpsdConfig, teacher: str, file: str) -> None:
    """An FP8 teacher was measured with this run's brief on its tasks or corpus, and this host's devices can run it; without one, its workers
    look at theirs.

    Raises:
        OpsdError: see :func:`verl_opsd.teachers.fp8.read`, ``require_measured`` and ``require_device``.
    """
    import torch

    from verl_opsd.teachers import fp8
    from verl_opsd.tokens.store import corpus_digest

    found, brief = fp8.read(Path(file).expanduser()), opsd.brief
    corpus = None if opsd.corpus is None else corpus_digest(RunDir(Path(opsd.corpus).expanduser()).episodes)
    views = fp8.views_of(brief.placement, brief.user_turn, brief.max_view_tokens, brief.window_context)
    tasks = f"{opsd.tasks.dataset} {opsd.tasks.train}"
    fp8.require_measured(found, fp8.Measured(model_digest(teacher), "bfloat16", brief.name, views, tasks, corpus), teacher)
    here = torch.cuda.is_available()
    if here or not opsd.scale.startswith("gpu"):
        fp8.require_device(torch.cuda.get_device_capability() if here else None)


def check_tokens(student_path: str, teacher_path: str, where: str = "opsd.teacher") -> None:
    """Vocabulary, ends of a turn and generation prefix of both sides agree, id by id.

    Raises:
        OpsdError: the first of them that differs, with both values.
    """
    ours, theirs = (tokenizer_of(p) for p in (student_path, teacher_path))
    a, b = ours.get_vocab(), theirs.get_vocab()
    different = sorted((k for k in a.keys() | b.keys() if a.get(k) != b.get(k)), key=lambda k: (a.get(k, 1 << 30), k))
    ends = (ours.eos_token_id, theirs.eos_token_id)
    if different or ends[0] != ends[1]:
        shown = ", ".join(f"{k!r}: {a.get(k)} / {b.get(k)}" for k in different[:3]) or f"end token {ends[0]} / {ends[1]}"
        raise OpsdError(
            f"{where}.path={teacher_path} has another tokenizer than the student ({len(different)} entries: {shown})",
            "the teacher re-scores the student's own token ids, so both must read them alike",
            "choose a teacher of the student's family",
        )
    stops = [_stops(p) for p in (student_path, teacher_path)]
    frames = [_frame_of(t, path, where) for t, path in ((ours, student_path), (theirs, teacher_path))]
    compared: list[tuple[str, list[int] | None, list[int] | None]] = [
        ("tokens that end a turn (generation_config)", stops[0], stops[1]),
        ("generation prefix", frames[0][0], frames[1][0]),
        ("tokens after a reply", frames[0][1], frames[1][1]),
    ]
    for what, mine, other in compared:
        if mine is not None and other is not None and mine != other:
            raise OpsdError(
                f"{where}.path={teacher_path} has other {what} than the student: {_named(ours, mine)} / {_named(ours, other)}",
                "the teacher is asked about replies that begin and end as its own do; elsewhere its probabilities are of another place",
                "choose a teacher with the student's chat template, or give both the same template",
            )


def frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of the generation prefix, and those that follow a reply's text, by the tokenizer's chat template."""

    def render(messages: list[dict[str, str]], prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return list(tokenizer.encode(text, add_special_tokens=False))

    asked, prompted = render(_CHAT[:1], False), render(_CHAT[:1], True)
    text = tokenizer.apply_chat_template(_CHAT, tokenize=False)
    return prompted[len(asked) :], list(tokenizer.encode(text[text.rindex("yz") + 2 :], add_special_tokens=False))


def _frame_of(tokenizer: Any, path: str, where: str) -> tuple[list[int], list[int]]:
    from jinja2 import TemplateError

    try:
        return frame(tokenizer)
    except (ValueError, TemplateError) as e:  # there is none, or it refuses a plain exchange
        raise OpsdError(
            f"{where}: the chat template of {path} renders no exchange: {str(e).splitlines()[0][:160]}",
            "the teacher is asked about replies that begin and end as its own do",
            "give the teacher the student's chat template (chat_template.jinja in its folder)",
        ) from e


def server_length(opsd: OpsdConfig, name: str, model: ModelTeacher, vocabulary: int) -> int | None:
    """Tokens of a view that a server's model takes, once the server has shown that it gives what a teacher gives
    (``ServerTeacher.probe``): one fewer than of prompt and reply."""
    from verl_opsd.teachers.server import ServerTeacher

    assert model.url is not None and model.path is not None
    teacher = ServerTeacher(model.url, model.path, name, opsd.loss.top_k or 0, vocabulary, model.requests)

    async def ask() -> int | None:
        try:
            return (await teacher.probe()).max_length
        finally:
            await teacher.close()

    length = asyncio.run(ask())
    return None if length is None else length - 1


def teacher_positions(opsd: OpsdConfig, student_path: str) -> int | None:
    """Tokens that every model which scores this run's views takes; None where none says. A server is asked."""
    models = models_of(opsd)
    if not models:
        return _positions(student_path)
    limits = (_limit(opsd, name, model, student_path) for name, model in models.items())
    return min((n for n in limits if n is not None), default=None)


def _limit(opsd: OpsdConfig, name: str, model: ModelTeacher, student_path: str) -> int | None:
    """Tokens of a view that one teacher takes: what its config says, and what its server says."""
    assert model.path is not None
    served = server_length(opsd, name, model, vocabulary_rows(student_path)) if model.kind == "server" else None
    return min((n for n in (_positions(model.path), served) if n is not None), default=None)


def _positions(path: str) -> int | None:
    from verl_opsd.verl_adapter.brief_checks import positions_of

    return positions_of(path)


def _stops(path: str) -> list[int] | None:
    """Ids at which generation of a reply ends, as the model's folder says; None where it does not.

    Raises:
        OpsdError: a file that can't be read.
    """
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError as e:
        file = Path(path).expanduser() / "generation_config.json"
        if file.is_file():
            raise OpsdError(f"{file}: {e}", "it says at which tokens a reply ends", "repair it, or remove it") from e
        return None
    return None if found is None else sorted(found) if isinstance(found, list) else [found]


def _named(tokenizer: Any, ids: list[int]) -> str:
    return f"{ids} {tokenizer.convert_ids_to_tokens(ids)}"
