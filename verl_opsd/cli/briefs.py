"""``opsd briefs list|show|audit|draft|import``: what a teacher would be told, and what that gives away."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError

if TYPE_CHECKING:
    from verl_opsd.cooperbench.types import PairTask
    from verl_opsd.privilege import Brief


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``briefs`` and its commands; each sets ``func``, which takes the arguments and returns the exit code."""
    briefs = subparsers.add_parser("briefs", help="list, show and audit briefs; write workflows")
    commands = briefs.add_subparsers(dest="briefs_command", required=True)
    commands.add_parser("list", help="registered briefs, their kind, source and status").set_defaults(func=list_briefs)
    show = commands.add_parser("show", help="a brief as a pair's agents' teachers read it")
    show.set_defaults(func=show_brief)
    check = commands.add_parser(
        "audit", help="what a brief gives away over all pairs; 1 when a brief holds more than it declares"
    )
    check.set_defaults(func=audit_briefs)
    draft = commands.add_parser("draft", help="a skeleton of a pair's workflow, from its gold patches")
    draft.set_defaults(func=draft_workflow)
    for command in (show, check, draft):
        command.add_argument("--dataset", default="pocket", help="`pocket`, or a folder in CooperBench's layout")
        command.add_argument("--pairs", default="pocket_train", help="subset, or pairs by key: repo/task7/f1_f2")
    for command in (show, check):
        command.add_argument("name", help="registered name, or several joined by +")
        command.add_argument("--files", help="folder of workflows, for the brief workflow")
        command.add_argument("--allow-answer", action="store_true", help="permit a brief that holds answers")
        command.add_argument("--reveal", action="store_true", help="print answers and leaks word for word")
    show.add_argument("--tokenizer", help="model folder: also gives the length in tokens")
    take = commands.add_parser("import", help="workflow files from frozen blocks: {pair: {shape, regions, kind, agents}}")
    take.add_argument("blocks", type=Path, help="JSON file")
    take.add_argument("out", type=Path, help="folder for the workflow files")
    take.set_defaults(func=import_workflows)


def _pairs(args: argparse.Namespace) -> list[PairTask]:
    from verl_opsd.cooperbench.dataset import dataset_folder, load_subset

    return load_subset(args.pairs, dataset_folder(args.dataset))


def _briefs(args: argparse.Namespace, pair: PairTask) -> dict[str, Brief]:
    from verl_opsd.cooperbench.pair_briefs import briefs_of
    from verl_opsd.privilege import Brief

    made = briefs_of(pair, args.name, allow_answer=args.allow_answer, files=args.files)
    return {agent: b for agent, b in made.items() if isinstance(b, Brief)}


def list_briefs(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints every registered brief."""
    from verl_opsd.privilege import brief_names
    from verl_opsd.privilege.library import sources

    known = sources()
    table = Table("brief", "source", "status")
    for name in brief_names():
        table.add_row(name, *known.get(name, ("made from the task's files" if name not in ("none", "mixed") else "", "")))
    (console or Console()).print(table)
    return 0


def show_brief(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints each agent's brief: kind, hash, length, text (answers are left out unless ``--reveal``)."""
    console = console or Console()
    tokenizer = None
    if args.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    for pair in _pairs(args):
        for agent, brief in _briefs(args, pair).items():
            tokens = "" if tokenizer is None else f", {len(brief.ids(tokenizer))} tokens"
            console.rule(f"{pair.key} {agent}: {brief.kind}, {len(brief.text)} characters{tokens}, {brief.hash[:12]}")
            console.print(brief.text if args.reveal else brief.shown, markup=False, highlight=False, soft_wrap=True)
    return 0


def audit_briefs(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints a row a brief and the verdict over all; 1 when one holds more than it declares."""
    from verl_opsd.cooperbench.pair_briefs import base_tree, material, require_patches, require_workflows
    from verl_opsd.privilege import audit, distinct_texts

    if args.files:
        require_workflows(_pairs(args), args.files)
    table = Table("pair", "agent", "kind", "characters", "derivable", "verdict")
    made, leaking = [], 0
    console = console or Console()
    for pair in _pairs(args):
        require_patches(pair)
        base = base_tree(pair)
        for agent, brief in _briefs(args, pair).items():
            found = audit(brief, material(pair, agent, base, elsewhere="wrong_task" in args.name.split("+")))
            made.append(brief)
            leaking += bool(found.findings)
            share = f"{found.derivable:.2f} of {found.specifics}"
            table.add_row(pair.key, agent, brief.kind, str(found.characters), share, found.verdict)
            if args.reveal:
                for f in found.findings:
                    console.print(
                        f"{pair.key} {agent} {f.kind} in {f.section}: {f.text}", markup=False, highlight=False, soft_wrap=True
                    )
    console.print(table)
    console.print(f"{len(made)} briefs, {distinct_texts(made)} distinct texts, {leaking} not answer-free")
    return int(bool(leaking) and not args.allow_answer)


def draft_workflow(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints the skeleton of each pair's workflow, with the name of its file."""
    from verl_opsd.cooperbench.pair_briefs import patch_of
    from verl_opsd.privilege.workflows import draft, file_name

    console = console or Console()
    for pair in _pairs(args):
        console.rule(file_name(pair.key))
        console.print(
            draft(pair.key, *(patch_of(pair, f, "gold") for f in pair.features)), markup=False, highlight=False, end=""
        )
    return 0


def import_workflows(args: argparse.Namespace, console: Console | None = None) -> int:
    """Writes one file a block; existing files are kept.

    Raises:
        OpsdError: no JSON object, a refused block, or a file that exists.
    """
    from verl_opsd.privilege.workflows import import_blocks

    try:
        blocks = json.loads(args.blocks.read_text())
    except (OSError, ValueError) as e:
        raise OpsdError(f"{args.blocks}: {e}", "blocks are a JSON object of pairs", "correct the file") from e
    files = list(import_blocks(blocks))
    taken = [name for name, _ in files if (args.out / name).exists()]
    if taken:
        raise OpsdError(f"{args.out} holds {taken[:3]}", "a workflow is never overwritten", "import into another folder")
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in files:
        (args.out / name).write_text(text)
    (console or Console()).print(f"{len(files)} workflows in {args.out}")
    return 0
