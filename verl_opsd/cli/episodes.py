"""``opsd episodes list|show|export|import``: stored episodes, read like conversations, and as the harness' own logs."""

from __future__ import annotations

import argparse
import datetime
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column
from rich.text import Text

from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError

if TYPE_CHECKING:
    from verl_opsd.evaluation.behaviour.events import Pair, Step
    from verl_opsd.tokens.records import Episode, TurnRecord
    from verl_opsd.tokens.store import EpisodeStore

#: Characters of one text or output that are shown; what is left out is told.
SHOWN = 600


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``episodes`` and its commands; each sets ``func``, which takes the arguments and returns the exit code."""
    episodes = subparsers.add_parser("episodes", help="stored episodes: list, read, export, import")
    commands = episodes.add_subparsers(dest="episodes_command", required=True)
    several = commands.add_parser("list", help="one row an episode: outcome, merge, features, reward")
    several.set_defaults(func=list_episodes)
    one = commands.add_parser("show", help="one episode as a conversation, the two agents side by side, in order of time")
    out = commands.add_parser("export", help="write the harness' own log tree, which `cooperbench eval` reads")
    for command in (several, one, out):
        command.add_argument("run", type=Path, help="run directory")
    one.add_argument("episode", help="its id, as `opsd episodes list` shows it")
    one.add_argument("--full", action="store_true", help=f"whole texts and outputs, not their first {SHOWN} characters")
    one.set_defaults(func=show_episode)
    out.add_argument("logs", type=Path, help="folder of the logs")
    out.add_argument("--name", help="name of the run there; default: that of the run directory")
    out.add_argument("--split", choices=("train", "eval"), default="eval", help="default: eval")
    out.add_argument("--without-grades", action="store_true", help="no eval.json: the harness' own eval grades the patches")
    out.set_defaults(func=export)
    take = commands.add_parser("import", help="store the logs of one run of the harness as episodes of a legacy contract")
    take.add_argument("logs", type=Path, help="the run's folder of logs")
    take.add_argument("run", type=Path, help="new run directory")
    take.add_argument("--without-ids", action="store_true", help="leave out the token ids that the harness captured")
    take.set_defaults(func=import_logs)


def _store(run: Path) -> EpisodeStore:
    from verl_opsd.rundir import RunDir
    from verl_opsd.tokens.store import EpisodeStore

    folder = RunDir(run).episodes
    if not folder.is_dir():
        raise OpsdError(f"{run} holds no episodes", "a run directory has a folder `episodes`", "name a run's directory")
    return EpisodeStore(folder)


def list_episodes(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints the table."""
    table = Table(Column("episode", no_wrap=True), "pair", "outcome", "merge", "features", "reward", "own briefs")
    for e in _store(args.run).episodes():
        grade = e.grade
        features = "" if grade is None else " ".join(f"{f.feature_id}:{'pass' if f.passed else 'fail'}" for f in grade.features)
        reward = "" if grade is None else f"{grade.reward:g}"
        table.add_row(
            e.episode_id, e.pair_key, e.outcome, grade.merge_kind if grade else "", features, reward, e.actor_brief_kind
        )
    (console or Console()).print(table)
    return 0


def show_episode(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints head, conversation and grade."""
    from verl_opsd.evaluation.behaviour.events import stream

    console = console or Console()
    e = _store(args.run).read(args.episode)
    head = f"{e.episode_id}  {e.pair_key}  {e.outcome}  contract {e.contract_hash[:14]}  model version {e.model_version}"
    console.print(head, highlight=False)
    if e.near_benchmark:
        console.print(e.near_benchmark, highlight=False)
    pair = stream(e)
    agents = sorted(pair.steps)
    if agents:
        console.print(_conversation(pair, agents, None if args.full else SHOWN, e.t_start))
    for line in _not_shown(e.turns):
        console.print(line, highlight=False)
    _print_end(e, console)
    return 0


def _not_shown(turns: Sequence[TurnRecord]) -> list[str]:
    """A line for the replies that were recorded and are no steps of the conversation."""
    counts = Counter((t.agent_id, t.kind) for t in turns if t.kind != "policy")
    told = ", ".join(f"{n} of kind {kind} by {agent}" for (agent, kind), n in sorted(counts.items()))
    return [f"recorded replies that the harness took no command from: {told}"] if told else []


def _conversation(pair: Pair, agents: list[str], limit: int | None, start: float) -> Table:
    """One row a step, in order of time, in the column of its agent. Steps without a time (old logs) come in their own order."""
    table = Table("seconds", *agents, show_lines=True, expand=True)
    steps = [(s.t if s.t == s.t else float("inf"), s.i, agent, s) for agent in agents for s in pair.steps[agent]]
    for t, _, agent, step in sorted(steps, key=lambda x: x[:3]):
        cells = [_step(pair, agent, step, limit) if a == agent else Text() for a in agents]
        table.add_row("" if t == float("inf") else f"{t - start:.1f}", *cells)
    return table


def _step(pair: Pair, agent: str, step: Step, limit: int | None) -> Text:
    out = Text()
    for s in pair.sends:
        if s.to == agent and s.read_at == step.i:
            out.append(f"[from {s.sender}] {_cut(s.text, limit)}\n", style="green")
    out.append(f"{step.i}  ", style="bold")
    out.append(_cut(step.text, limit))
    for c in step.commands:
        out.append(f"\n$ {_cut(c.text, limit)}", style="cyan")
        if c.output or c.returncode:
            out.append(f"\n{_cut(c.output, limit)}" + (f"  (exit {c.returncode})" if c.returncode else ""), style="dim")
    for s in pair.sends:
        if s.sender == agent and s.step == step.i:
            out.append(f"\n[to {s.to}, {s.status}] {_cut(s.text, limit)}", style="green")
    return out


def _cut(text: str, limit: int | None) -> str:
    text = text.strip()
    return text if limit is None or len(text) <= limit else f"{text[:limit]} [{len(text) - limit} characters more]"


def _print_end(e: Episode, console: Console) -> None:
    table = Table(
        "agent", "feature", "status", "steps", "sent", "pull request", "patch lines", "tests", "harness", "strict", "why"
    )
    grades = {f.feature_id: f for f in e.grade.features} if e.grade else {}
    word = {True: "passes", False: "fails", None: "-"}
    for a in e.agents:
        f = grades.get(a.feature_id)
        graded = ("", "", "", "")
        if f is not None:
            graded = (f"{f.tests_passed} passed, {f.tests_failed} failed", word[f.passed], word[f.strict], f.note)
        numbers = (str(a.steps), str(a.sent_messages), "yes" if a.opened_pr else "no", str(len(a.patch.splitlines())))
        table.add_row(a.agent_id, str(a.feature_id), a.status, *numbers, *graded)
    console.print(table)
    if e.grade is not None:
        when = datetime.datetime.fromtimestamp(e.t_end, datetime.timezone.utc).isoformat(timespec="seconds")
        console.print(
            f"merge {e.grade.merge_kind} ({e.grade.strategy}), reward {e.grade.reward:g}, ended {when}", highlight=False
        )


def export(args: argparse.Namespace, console: Console | None = None) -> int:
    """Writes the logs and says what was left out."""
    from verl_opsd.evaluation.export import contract_of, write_log_tree

    console, store = console or Console(), _store(args.run)
    name = args.name or args.run.resolve().name
    chosen = (e for e in store.episodes() if e.split == args.split)
    folders, left_out = write_log_tree(chosen, args.logs, name, contract_of(store, args.run), not args.without_grades)
    console.print(f"{len(folders)} episodes in {args.logs}", highlight=False)
    for outcome, count in sorted(left_out.items()):
        console.print(f"left out: {count} that ended as {outcome} before the agents had handed in", highlight=False)
    return 0 if folders else 1


def import_logs(args: argparse.Namespace, console: Console | None = None) -> int:
    """Stores the logs and prints the ids."""
    from verl_opsd.evaluation.export import import_log_tree
    from verl_opsd.rundir import RunDir

    ids = import_log_tree(args.logs, RunDir(args.run).episodes, not args.without_ids)
    (console or Console()).print(f"{len(ids)} episodes of a legacy contract in {args.run}", highlight=False)
    return 0
