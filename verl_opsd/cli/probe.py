"""``opsd probe RUN`` and ``opsd why RUN EPISODE TURN``: what a teacher is worth on recorded episodes, without training."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError

if TYPE_CHECKING:
    from verl_opsd.cooperbench.types import PairTask
    from verl_opsd.privilege import Brief
    from verl_opsd.probe.states import BriefChoice
    from verl_opsd.rundir import RunDir
    from verl_opsd.teachers.device import DeviceTeacher
    from verl_opsd.tokens.records import Episode

#: Thresholds, where no file gives others: those of the run's own gates, written down before it.
GATES = ("identity_max", "void_max", "shifted_min", "conditioning_min")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``probe`` and ``why``."""
    probe = subparsers.add_parser(
        "probe", help="controls, the brief's effect, the teacher's pull, on a run's episodes; 1: a gate failed"
    )
    why = subparsers.add_parser("why", help="top tokens of student, teacher and briefed teacher at one turn")
    for p in (probe, why):
        p.add_argument("run", type=Path, help="run directory with episodes")
        p.add_argument("--brief", help="default: the run's")
        p.add_argument("--files", help="folder of workflows")
        p.add_argument("--allow-answer", action="store_true")
        p.add_argument("--student", help="model folder; default: the run's")
        p.add_argument("--adapter", help="LoRA adapter of the student, PEFT layout")
        p.add_argument("--teacher", help="model folder; default: the student without adapter")
        p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
        p.add_argument("--device", default="cpu")
    probe.add_argument("--episodes", type=_count, help="the first so many; default: all")
    probe.add_argument(
        "--leave-out", nargs="+", default=[], metavar="EPISODE", help="go on without these, e.g. damaged ones; recorded"
    )
    probe.add_argument("--arms", nargs="+", help="default: brief wrong_task shuffled content_free")
    probe.add_argument("--placements", nargs="+", choices=("system", "last_user"), default=["system", "last_user"])
    probe.add_argument("--teacher-run", type=Path, help="run whose trajectories the teacher wrote: are they teachable?")
    probe.add_argument(
        "--fp8", action="store_true", help="also measure an FP8 teacher's error beside the signal, into fp8.json"
    )
    probe.add_argument("--gates", type=Path, help=f"JSON file with {', '.join(GATES)}, written before the probe")
    probe.add_argument("--out", type=Path, help="default: RUN/probe")
    probe.set_defaults(func=run_probe)
    why.add_argument("episode")
    why.add_argument("turn", type=int)
    why.add_argument("--agent", default="agent1")
    why.add_argument("--placement", choices=("system", "last_user"), default="system")
    why.add_argument("--tokens", type=_count, default=8, help="positions, those with the largest effect")
    why.set_defaults(func=show_why)


def _open(args: argparse.Namespace, meta: dict[str, Any]) -> tuple[Any, BriefChoice, DeviceTeacher, DeviceTeacher]:
    import torch
    from transformers import AutoTokenizer

    from verl_opsd.probe.states import BriefChoice
    from verl_opsd.teachers.device import DeviceTeacher

    brief = meta["opsd"]["brief"]
    path, dtype = args.student or meta["student"], getattr(torch, args.dtype)
    _check_models(meta["student"], args.student, args.teacher, args.adapter)
    name = args.brief or brief["name"]
    if args.files is not None and "workflow" not in name.split("+"):
        raise OpsdError(f"--files {args.files} with brief {name}", "the brief workflow is read from files", "leave it out")
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as e:  # no such name; no such device here
        what = f"--device {args.device}: {str(e).splitlines()[0]}"
        raise OpsdError(what, "models are scored on a device that torch has here", "use cpu, or cuda where there is one") from e
    student = DeviceTeacher(path, dtype, args.device, "student", args.adapter)
    own_base = args.teacher is None and args.adapter is None
    teacher = student if own_base else DeviceTeacher(args.teacher or path, dtype, args.device, "teacher")
    limits = [n for n in (brief.get("max_view_tokens"), student.limits[0], teacher.limits[0]) if n is not None]
    choice = BriefChoice(
        name,
        args.allow_answer or (args.brief is None and brief["allow_answer"]),
        args.files or (brief.get("files") if args.brief is None else None),
        brief["user_turn"],
        min(limits, default=None),
        brief.get("window_context"),
    )
    return AutoTokenizer.from_pretrained(path), choice, student, teacher


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of 1 or more")
    return int(text)


def _meta(run: RunDir) -> dict[str, Any]:
    file = run.path / "meta.json"
    try:
        meta = json.loads(file.read_text())
        if {"brief", "tasks", "gates"} <= meta["opsd"].keys() and meta["student"]:
            return dict(meta)
        what = "lacks the brief, tasks or gates of a distillation run"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        what = f"{type(e).__name__}: {e}"
    raise OpsdError(f"{file}: {what}", "a probe reads the directory of a `+recipe=opd` run", "name one")


def _check_models(
    recorded: str, student: str | None, teacher: str | None, adapter: str | None, name: str = "--teacher"
) -> None:
    """Every model reads the recorded ids as the model that wrote them did. ``name``: of the teacher in what is refused.

    Raises:
        OpsdError: a folder that is no model or adapter, another tokenizer, end of a turn or generation prefix, or another vocabulary.
    """
    from verl_opsd.verl_adapter.requirements import check_model_path, vocabulary_rows
    from verl_opsd.verl_adapter.teacher_checks import check_tokens

    for where, path in (("the run's student", recorded), ("--student", student), (name, teacher)):
        if path is not None:
            check_model_path(path, where)
    if adapter is not None and not (Path(adapter) / "adapter_config.json").is_file():
        raise OpsdError(
            f"--adapter {adapter} holds no adapter_config.json", "an adapter is a folder in PEFT's layout", "name one"
        )
    for where, path in (("--student", student), (name, teacher)):
        if path is not None:
            check_tokens(recorded, path, where)
            rows = [vocabulary_rows(p) for p in (student or recorded, path)]
            if rows[0] != rows[1]:
                raise OpsdError(
                    f"{where}={path} with {rows[1]} vocabulary rows, the student has {rows[0]}",
                    "both sides have a probability for the same tokens",
                    "choose a model of the student's family",
                )


def _hints(run: RunDir) -> Callable[[PairTask, Episode], dict[str, Brief]]:
    """What the actors of a run had read in their own prompts."""
    from verl_opsd.verl_adapter.actor_briefs import hints_of, read_by_actors

    return functools.partial(hints_of, read_by_actors(run.path))


def thresholds(file: Path | None, meta: dict[str, Any]) -> dict[str, float]:
    """The gates' thresholds: a file's, or those of the run.

    Raises:
        OpsdError: no JSON object, other keys, or values that are no finite numbers of at least 0.
    """
    if file is None:
        gates = meta["opsd"]["gates"]
        floor = gates["identity_max"]
        return {"identity_max": floor, "void_max": floor, "shifted_min": gates["shifted_min"], "conditioning_min": floor}
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise OpsdError(f"{file}: {e}", "thresholds are a JSON file", "correct it") from e
    if (
        not isinstance(values, dict)
        or set(values) != set(GATES)
        or not all(type(v) in (int, float) and 0 <= v < math.inf for v in values.values())
    ):
        raise OpsdError(f"{file}: {values}", f"thresholds are {', '.join(GATES)}, numbers of at least 0", "correct the file")
    return {k: float(v) for k, v in values.items()}


def run_probe(args: argparse.Namespace, console: Console | None = None) -> int:
    """Measures, writes ``probe.json`` and ``probe.html``, appends the verdicts to the run's ``evidence.jsonl``."""
    import torch

    from verl_opsd.probe.fp8 import measure_fp8
    from verl_opsd.probe.html import report
    from verl_opsd.probe.measure import measure, summary, teachability
    from verl_opsd.probe.recovery import recover
    from verl_opsd.probe.states import ARMS, coinciding, read_branches, split_fitting
    from verl_opsd.rundir import RunDir, write_json
    from verl_opsd.teachers.fp8 import STATISTICS
    from verl_opsd.tokens.store import corpus_digest

    console = console or Console()
    run = RunDir(args.run)
    meta = _meta(run)
    limits = thresholds(args.gates, meta)  # what can be refused is refused before models are loaded
    if args.teacher_run is not None:
        _check_models(meta["student"], None, _meta(RunDir(args.teacher_run))["student"], None, "--teacher-run's student")
    arms = args.arms or list(ARMS)
    if "brief" not in arms:
        raise OpsdError(f"arms {arms}", "the brief itself is always an arm", "add brief")
    tokenizer, choice, student, teacher = _open(args, meta)
    dataset = meta["opsd"]["tasks"]["dataset"]
    found = read_branches(run, dataset, tokenizer, args.episodes, _hints(run), args.leave_out)
    corpus = corpus_digest(run.episodes) if args.fp8 else ""
    positions = min((n for n in (student.limits[0], teacher.limits[0]) if n is not None), default=None)
    branches, left_out = split_fitting(found, choice, arms, args.placements, tokenizer, positions)
    same = coinciding(branches, arms, choice, tokenizer)
    arms = [a for a in arms if same.get(a) != len(branches)]
    workers = 1
    if args.device == "cpu":
        workers = len(os.sched_getaffinity(0))
        torch.set_num_threads(1)
    with console.status("") as status:
        probe = measure(
            branches,
            student,
            teacher,
            tokenizer,
            choice,
            arms,
            args.placements,
            lambda n: status.update(f"{n} of {len(branches)} branches"),
            workers=workers,
        )
        result = summary(probe) | {
            "left_out": left_out,
            "episodes_left_out": sorted(set(args.leave_out)),
            "same_as_brief": same,
        }
        status.update("prefix recovery")
        result["recovery"] = recover(branches, student, teacher, tokenizer, choice, args.placements[0])
    if args.teacher_run is not None:
        teachers = RunDir(args.teacher_run)
        theirs = read_branches(
            teachers, _meta(teachers)["opsd"]["tasks"]["dataset"], tokenizer, args.episodes, _hints(teachers)
        )
        result["teachability"]["teacher's trajectories"] = teachability(theirs, student)
    result |= {"brief": choice.name, "student": args.student or meta["student"], "teacher": args.teacher or "student's base"}
    verdicts = _verdicts(run, result, limits, args.placements[0], choice.name)
    result["gates"] = verdicts
    out = args.out or run.path / "probe"
    write_json(out / "probe.json", result)
    if args.fp8:
        named = args.teacher or args.student or meta["student"]
        tasks = meta["opsd"]["tasks"]
        fp8 = measure_fp8(
            branches,
            teacher,
            tokenizer,
            choice,
            args.placements[0],
            named,
            f"{tasks['dataset']} {tasks['train']}",
            corpus,
        )
        fp8.write(out / "fp8.json")
        shown = ", ".join(f"{k} {fp8.signal[k]:.2g} against {fp8.error[k]:.2g}" for k in STATISTICS)
        console.print(f"FP8 teacher, signal against error in nats: {shown}; {out / 'fp8.json'}", soft_wrap=True)
    (out / "probe.html").write_text(report(probe, result, verdicts, tokenizer, f"Probe of {choice.name}"), encoding="utf-8")
    for placement, tables in result["effect"].items():
        table = Table(
            "arm", "mean", "median", "p90", "p99", "flips", title=f"effect of the brief, placement {placement} (nats)"
        )
        for arm, s in tables["arms"].items():
            table.add_row(arm, *(f"{s[k]:.3g}" for k in ("mean", "median", "p90", "p99", "flips")))
        console.print(table)
    for arm, n in result["same_as_brief"].items():
        console.print(f"{arm} is the brief itself at {n} of {len(branches)} branches{', and left out' * (arm not in arms)}")
    for v in verdicts:
        console.print(
            f"{'pass' if v['passed'] else 'FAIL'}  {v['name']}: {v['value']:.3g} against {v['threshold']:.3g}", highlight=False
        )
    console.print(f"{out / 'probe.html'}", soft_wrap=True)
    return int(not all(v["passed"] for v in verdicts))


def _verdicts(
    run: RunDir, result: dict[str, Any], limits: dict[str, float], placement: str, brief: str
) -> list[dict[str, Any]]:
    controls, effect = result["controls"], result["effect"][placement]["arms"]["brief"]["mean"]
    identity, void, shifted = (controls[k]["mean"] for k in ("identity", "void", "shifted"))
    conditioned = effect > max(limits["conditioning_min"], 10 * identity)
    gone = [f"{n} branches left out: {why}" for why, n in result["left_out"].items() if n]
    gone += [f"episodes left out by name: {' '.join(result['episodes_left_out'])}"] * bool(result["episodes_left_out"])
    out = ", ".join(gone)
    detail = f"{brief}, {result['positions']} positions{'; ' * bool(out)}{out}"
    run.evidence("probe_identity", identity, limits["identity_max"], identity <= limits["identity_max"], detail)
    run.evidence("probe_void", void, limits["void_max"], void <= limits["void_max"], detail)
    run.evidence("probe_shifted", shifted, limits["shifted_min"], shifted > limits["shifted_min"], detail)
    run.evidence("probe_conditioning", effect, limits["conditioning_min"], conditioned, f"{detail}, placement {placement}")
    return [
        {
            "name": "identity",
            "value": identity,
            "threshold": limits["identity_max"],
            "passed": identity <= limits["identity_max"],
        },
        {"name": "void", "value": void, "threshold": limits["void_max"], "passed": void <= limits["void_max"]},
        {"name": "shifted", "value": shifted, "threshold": limits["shifted_min"], "passed": shifted > limits["shifted_min"]},
        {"name": "conditioning", "value": effect, "threshold": limits["conditioning_min"], "passed": conditioned},
    ]


def show_why(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints, at the positions of one turn with the largest effect, the most probable tokens of all three."""
    from verl_opsd.probe.states import read_branches
    from verl_opsd.probe.why import why
    from verl_opsd.rundir import RunDir
    from verl_opsd.tokens.store import EpisodeStore

    run = RunDir(args.run)
    meta = _meta(run)
    tokenizer, choice, student, teacher = _open(args, meta)
    here = args.episode if run.episodes.is_dir() and args.episode in EpisodeStore(run.episodes).ids() else None
    branches = read_branches(run, meta["opsd"]["tasks"]["dataset"], tokenizer, hints=_hints(run), only=here)
    found = why(branches, args.episode, args.agent, args.turn, student, teacher, tokenizer, choice, args.placement, args.tokens)
    table = Table(
        "position",
        "written",
        "student",
        "teacher",
        "teacher with brief",
        "effect",
        "pull",
        title=f"{args.episode} {args.agent} turn {args.turn}",
    )
    for row in found:
        table.add_row(
            str(row["position"]),
            Text(repr(row["written"])),  # a token such as `[i]` is no markup
            *(Text("\n".join(f"{p:6.1%} {text!r}" for text, p in row[k])) for k in ("student", "teacher", "briefed")),
            f"{row['effect']:.3g}",
            f"{row['pull']:.3g}",
        )
    (console or Console()).print(table)
    return 0
