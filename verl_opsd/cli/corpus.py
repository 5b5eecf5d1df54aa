"""``opsd corpus build|check|show``: trajectories that passed become a corpus, gated and described."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError

if TYPE_CHECKING:
    from verl_opsd.corpus.contamination import Evaluated


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``corpus`` and its commands; each sets ``func``, which takes the arguments and returns the exit code."""
    corpus = subparsers.add_parser("corpus", help="make, check and show training corpora")
    commands = corpus.add_subparsers(dest="corpus_command", required=True)
    build = commands.add_parser("build", help="take what passed out of recorded runs")
    build.add_argument("runs", type=Path, nargs="+", help="run directories")
    build.set_defaults(func=build_corpus)
    render = commands.add_parser("render", help="turn a file of chat messages into a corpus, by a stated rendering step")
    render.add_argument("file", type=Path, help='JSONL, a line {"messages": [...], "tools": [...]}')
    render.add_argument("--model", required=True, help="whose tokenizer and chat template render it")
    render.set_defaults(func=render_corpus)
    for command in (build, render):
        _common(command)
    build.add_argument("--split", choices=("train", "eval"), default="train", help="eval: of runs of +recipe=collect")
    build.add_argument("--level", choices=("feature", "pair"), default="feature", help="success gate")
    build.add_argument("--max-per-task", type=int, help="agents' runs of one task, at most")
    build.add_argument("--max-observation", type=int, default=24_000, help="characters of one tool result, at most")
    build.add_argument("--allow-answer", action="store_true", help="take runs whose actor had an answer in its prompt")
    check = commands.add_parser("check", help="every gate of a corpus; exit code 1 when one fails")
    check.add_argument("corpus", type=Path, help="folder of the corpus")
    check.add_argument("--source", type=Path, nargs="+", default=[], help="run directories that have moved since it was built")
    check.add_argument("--without-sources", action="store_true", help="leave out the gates that compare with the episodes")
    check.set_defaults(func=check_corpus)
    show = commands.add_parser("show", help="composition, yield, exclusions and gates")
    show.add_argument("corpus", type=Path, help="folder of the corpus")
    show.set_defaults(func=show_corpus)


def _common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, required=True, help="folder of the corpus; must not exist")
    command.add_argument(
        "--eval", nargs="+", required=True, metavar="SUBSET", help="every subset that its model will be evaluated on"
    )
    command.add_argument("--dataset", default="pocket", help="where these subsets lie; default: the pocket tasks")
    command.add_argument(
        "--disjoint", choices=("repo", "task"), default="repo", help="what training and evaluation must not share"
    )
    command.add_argument(
        "--near-duplicate", type=_similarity, default=0.9, help="similarity from which on a row is dropped, or off"
    )
    command.add_argument("--validation", type=float, default=0.0, help="share of the episodes that is held out")
    command.add_argument("--seed", type=int, default=0, help="of the draws")


def _similarity(text: str) -> float | None:
    return None if text == "off" else float(text)


def build_corpus(args: argparse.Namespace, console: Console | None = None) -> int:
    """Builds a corpus and shows it."""
    from verl_opsd.corpus.build import build
    from verl_opsd.corpus.select import Spec, open_sources
    from verl_opsd.verl_adapter.rendering import harness_tools, hints_of_run, rendering_of

    names = {f.name for f in dataclasses.fields(Spec)}
    spec = Spec(**{k: v for k, v in vars(args).items() if k in names})
    for path in args.runs:
        if not (path / "meta.json").is_file():
            raise OpsdError(f"{path} holds no meta.json", "a corpus is made of run directories", "name such a directory")
    models = {json.loads((path / "meta.json").read_text())["student"] for path in args.runs}
    if len(models) != 1:
        raise OpsdError(f"runs of the models {sorted(models)}", "a corpus has one tokenizer", "build one corpus a model")
    (model,) = models
    sources = open_sources(args.runs, lambda run: hints_of_run(run, model))
    rendering = rendering_of(model, harness_tools())
    manifest = build(sources, spec, rendering, _target(args.dataset, args.eval, args.disjoint), args.out, model, args.dataset)
    _show(manifest, console or Console())
    return 0


def render_corpus(args: argparse.Namespace, console: Console | None = None) -> int:
    """Renders a file of chat messages and shows the corpus."""
    from verl_opsd.corpus.build import build_rendered
    from verl_opsd.corpus.select import Spec
    from verl_opsd.verl_adapter.rendering import chat_rows, rendering_of

    spec = Spec(near_duplicate=args.near_duplicate, validation=args.validation, seed=args.seed)
    rendering = rendering_of(args.model, None)
    rows = chat_rows(args.file, args.model, rendering)
    target = _target(args.dataset, args.eval, args.disjoint)
    _show(build_rendered(args.file, rows, spec, rendering, target, args.out, args.model, args.dataset), console or Console())
    return 0


def check_corpus(args: argparse.Namespace, console: Console | None = None) -> int:
    """Runs every gate again and prints its verdict.

    Raises:
        OpsdError: a manifest that was changed so that no gate can be run.
    """
    from verl_opsd.corpus.records import read_manifest

    try:
        return _check_corpus(args, console or Console())
    except (KeyError, TypeError, AttributeError, ValueError):
        read_manifest(args.corpus)  # the error is the manifest's, where it is not what was written
        raise


def _check_corpus(args: argparse.Namespace, console: Console) -> int:
    from verl_opsd.corpus.gates import check
    from verl_opsd.corpus.records import read_manifest
    from verl_opsd.corpus.select import open_sources
    from verl_opsd.verl_adapter.rendering import chat_rows, harness_tools, hints_of_run, rendering_of

    manifest = read_manifest(args.corpus, changed=True)
    evaluation = manifest["evaluation"]
    sources = None
    if not args.without_sources:
        moved = {path.resolve().name: path for path in args.source}
        recorded = [s for s in manifest["sources"] if s["origin"] == "recorded"]
        runs = [moved.get(s["name"], Path(s["path"])) for s in recorded]
        sources = {s.name: s for s in open_sources(runs, lambda run: hints_of_run(run, manifest["model"]))}
    target = _target(evaluation["dataset"], list(evaluation["subsets"]), evaluation["level"])
    files = [Path(s["path"]) for s in manifest["sources"] if s["origin"] == "rendered"]
    rendering = rendering_of(manifest["model"], None if files else harness_tools())
    again = [] if sources is None else [row for f in files for row in chat_rows(f, manifest["model"], rendering)]
    verdicts = check(args.corpus, rendering, target, sources, again)
    table = Table("gate", "verdict", "what")
    for v in verdicts:
        table.add_row(v.gate, v.verdict, v.detail)
    console.print(table)
    return int(any(v.verdict == "fail" for v in verdicts))


def show_corpus(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints what the manifest says."""
    from verl_opsd.corpus.records import read_manifest

    _show(read_manifest(args.corpus), console or Console())
    return 0


def _target(dataset: str, names: list[str], level: Any) -> Evaluated:
    from verl_opsd.cooperbench.dataset import dataset_folder
    from verl_opsd.corpus.contamination import evaluated, subsets_named

    return evaluated(subsets_named(dataset_folder(dataset), names), level)


def _show(manifest: dict[str, Any], console: Console) -> None:
    counts = manifest["composition"]
    classes = list(counts["by_class"])
    table = Table("source", "task", *classes, title=f"{manifest['name']}: tokens by source, task and class")
    for row in counts["by_source_and_task"]:
        table.add_row(row["source"], row["task"], *(str(row[c]) for c in classes))
    console.print(table)
    from verl_opsd.corpus.card import spread_lines

    lines = {
        "rows": f"{counts['rows']} of {counts['episodes']} episodes, {counts['loss_tokens']} loss tokens of {counts['sequence_tokens']}",
        "left out": ", ".join(f"{k} {len(v)}" for k, v in manifest["excluded"].items()) or "nothing",
        "gates": ", ".join(f"{g['gate']} {g['verdict']}" for g in manifest["gates"]),
    }
    for name, value in lines.items():
        console.print(f"{name}: {value}", highlight=False)
    for line in spread_lines(manifest["spread"]):
        console.print(line, highlight=False)
