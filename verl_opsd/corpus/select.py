"""Which trajectories of recorded episodes are taken: success gate, brief kinds, observation cap, rejection sampling with caps.

Everything that is left out is left out for a named reason, and counted.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl_opsd.contract import EvalContract
from verl_opsd.corpus.contamination import Evaluated, contamination_of_row
from verl_opsd.corpus.duplicates import near_duplicates
from verl_opsd.corpus.records import CorpusRow, row_of
from verl_opsd.corpus.rerender import Mismatch, Rendering, rerender
from verl_opsd.errors import OpsdError
from verl_opsd.evidence.graded import require_untouched
from verl_opsd.evidence.invalidation import Mark, marks
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.branches import build_trajectories
from verl_opsd.tokens.classes import token_classes
from verl_opsd.tokens.records import Episode, Ids, TurnKind
from verl_opsd.tokens.store import EpisodeStore

#: Fields of a contract that say which tasks a run touched, and nothing about how.
TOUCHED = ("dataset_hash", "subset_hash")
#: Kinds of turns that are trained on: replies that the harness took. Summaries and refused replies are context.
LOSS_KINDS: tuple[TurnKind, ...] = ("policy",)


@dataclass(frozen=True)
class Spec:
    """What a corpus takes.

    Attributes:
        split: of the episodes that are read: ``train`` of training runs, ``eval`` of ``+recipe=collect``.
        level: ``feature``: an agent's trajectories where its own feature passed on the merged tree; ``pair``: where both did.
        max_per_task: agents' runs that are taken of one task, at most; null takes all.
        near_duplicate: similarity from which on a row is dropped (``duplicates``); null keeps all.
        max_observation: characters of one tool result. The harness shows 10,000 at most, and JSON's escapes add to them.
        allow_answer: take trajectories whose actor had an answer in its own prompt.
        validation: share of the episodes that is held out as validation.
        seed: of the draws: which runs a cap keeps, which episodes are held out, which rows a person judges.
    """

    split: Literal["train", "eval"] = "train"
    level: Literal["feature", "pair"] = "feature"
    max_per_task: int | None = None
    near_duplicate: float | None = 0.9
    max_observation: int = 24_000
    allow_answer: bool = False
    validation: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        cap, near = self.max_per_task, self.near_duplicate
        if (cap is not None and cap < 1) or (near is not None and not 0 < near <= 1):
            raise OpsdError(
                f"max_per_task={cap} near_duplicate={near}",
                "a cap is at least 1 run, a similarity is in (0, 1]",
                "correct the value, or leave it out",
            )
        if self.max_observation < 1 or not 0 <= self.validation < 1:
            raise OpsdError(
                f"max_observation={self.max_observation} validation={self.validation}",
                "an observation has at least 1 character, and a share is in [0, 1)",
                "correct the value",
            )


Hints = Callable[[Episode], Mapping[str, list[int]]]


def no_hints(episode: Episode) -> dict[str, list[int]]:
    """Of a run whose actors had no brief."""
    return {}


@dataclass(frozen=True)
class Source:
    """One run whose episodes are read.

    Attributes:
        hints: ids of the brief that stood in each agent's own prompts, of those that had one. Rows don't hold it.
        marks: what was invalidated in the run.
    """

    name: str
    store: EpisodeStore
    contract: EvalContract
    path: str
    hints: Hints = no_hints
    marks: tuple[Mark, ...] = ()

    def invalidated(self, episode: Episode) -> str:
        """What invalidates an episode; empty when nothing does."""
        return next((str(m) for m in self.marks if m.covers(episode.model_version)), "")


@dataclass
class Selection:
    """Rows that are taken, and why others are not.

    Attributes:
        excluded: reason -> what was left out, each with its detail.
        attempts, successes: task -> agents' runs that were scored, and those that passed the success gate.
    """

    rows: list[CorpusRow] = field(default_factory=list)
    excluded: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    attempts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    successes: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def count(self, episode: Episode, agent_id: str, level: Literal["feature", "pair"]) -> bool:
        """Counts one agent's run of a scored episode; whether it passed."""
        task = f"{episode.repo}/task{episode.task_id}"
        passed = passes(episode, agent_id, level)
        self.attempts[task] += 1
        self.successes[task] += passed
        return passed


def open_sources(runs: Sequence[Path], hints: Callable[[Path], Hints] = lambda run: no_hints) -> list[Source]:
    """The runs' stores; all of one contract, but for the tasks that each run touched.

    Args:
        hints: see ``Source.hints``, by run directory.

    Raises:
        OpsdError: a directory that is no run, one whose log or graded episodes were changed, runs of two contracts, or two of one name.
    """
    sources: list[Source] = []
    for path in runs:
        run = RunDir(path)
        if not (path / "contract.json").is_file() or not run.episodes.is_dir():
            raise OpsdError(f"{path}", "a source is a run directory with contract.json and episodes/", "name such a directory")
        require_untouched(path, "source")
        contract = run.contract()
        if sources:
            sources[0].contract.require_same(contract, f"run {path}", without=TOUCHED, mine=f"run {sources[0].path}")
        name = path.resolve().name
        if name in {s.name for s in sources}:
            raise OpsdError(f"two sources named {name}", "rows are told apart by their source's name", "rename a directory")
        sources.append(Source(name, EpisodeStore(run.episodes), contract, str(path.resolve()), hints(path), tuple(marks(path))))
    return sources


def rows_of_episode(
    source: str, episode: Episode, agent_id: str, rendering: Rendering, hint: list[int] | None
) -> tuple[list[CorpusRow], int]:
    """Rows of one agent's branches that carry loss, without its hint, and the number of branches that carry none."""

    def classify(ids: Ids) -> Any:
        return token_classes(ids.tolist(), rendering.decode)

    turns = [t for t in episode.turns if t.agent_id == agent_id]
    branches = build_trajectories(turns, loss_kinds=LOSS_KINDS, classify=classify)
    plain = (rendering.strip(b, hint) if hint else b for b in branches if b.loss_mask.any())
    rows = [row_of(source, episode, b) for b in plain]
    return rows, len(branches) - len(rows)


def passes(episode: Episode, agent_id: str, level: Literal["feature", "pair"]) -> bool:
    """The success gate, on the merged tree, by the verdict that reward follows."""
    assert episode.grade is not None
    passed = {f.feature_id: f.earned for f in episode.grade.features}
    feature = next(a.feature_id for a in episode.agents if a.agent_id == agent_id)
    return all(passed.values()) if level == "pair" else passed[feature]


def unlike(row: CorpusRow, found: Mapping[int, Mismatch | None]) -> Mismatch | None:
    """The first difference (:func:`~verl_opsd.corpus.rerender.rerender`) of a row's loss turns."""
    turns = sorted({int(t) for t in row.turn_index[row.loss_mask == 1]})
    return next((found[t] for t in turns if found.get(t)), None)


def longest_observation(messages: Iterable[dict[str, Any]]) -> int:
    """Characters of the longest tool result."""
    return max((len(m.get("content") or "") for m in messages if m.get("role") == "tool"), default=0)


def draw(seed: int, *names: object) -> str:
    """A fixed random key of a name, for draws that don't depend on the order of reading."""
    return hashlib.sha256(repr((seed, *names)).encode()).hexdigest()


def select(sources: Sequence[Source], spec: Spec, rendering: Rendering, target: Evaluated) -> Selection:
    """Takes trajectories out of the sources' episodes."""
    out = Selection()
    runs: list[list[CorpusRow]] = []
    for source in sources:
        for episode in source.store.episodes():
            where = f"{source.name}/{episode.episode_id}"
            if episode.split != spec.split:
                out.excluded["other_split"].append(where)
            elif not episode.scored:
                out.excluded["infrastructure_fault"].append(f"{where}: {episode.outcome}")
            elif why := source.invalidated(episode):
                out.excluded["invalidated"].append(f"{where}: {why}")
            elif episode.actor_brief_kind == "answer" and not spec.allow_answer:
                out.excluded["answer_in_prompt"].append(where)
            else:
                for agent in episode.agents:
                    if rows := _of_agent(source, episode, agent.agent_id, spec, rendering, out):
                        runs.append(rows)
    runs = _clean(runs, rendering, target, out)
    if spec.near_duplicate is not None:
        runs = _distinct(runs, spec.near_duplicate, out)
    out.rows = [row for run in _capped(runs, spec, out) for row in run]
    return out


def _of_agent(
    source: Source, episode: Episode, agent_id: str, spec: Spec, rendering: Rendering, out: Selection
) -> list[CorpusRow]:
    where = f"{source.name}/{episode.episode_id}/{agent_id}"
    if not out.count(episode, agent_id, spec.level):
        out.excluded["not_passed"].append(where)
        return []
    messages = episode.messages.get(agent_id, [])
    longest = longest_observation(messages)
    if longest > spec.max_observation:
        out.excluded["observation_too_long"].append(f"{where}: {longest} characters")
        return []
    hint = source.hints(episode).get(agent_id)
    rows, without = rows_of_episode(source.name, episode, agent_id, rendering, hint)
    if without:
        out.excluded["branch_without_loss"].append(f"{where}: {without}")
    found = rerender([t for t in episode.turns if t.agent_id == agent_id], messages, rendering, hint or ())
    kept = []
    for row in rows:
        if wrong := unlike(row, found):
            out.excluded["not_rendered_again"].append(f"{row.name}: {wrong}")
        else:
            kept.append(row)
    return kept


def _clean(runs: list[list[CorpusRow]], rendering: Rendering, target: Evaluated, out: Selection) -> list[list[CorpusRow]]:
    kept = []
    for run in runs:
        reasons = [(row, contamination_of_row(row, rendering.decode(row.input_ids.tolist()), target)) for row in run]
        out.excluded["contaminated"] += [f"{row.name}: {why}" for row, why in reasons if why]
        kept.append([row for row, why in reasons if not why])
    return [run for run in kept if run]


def _distinct(runs: list[list[CorpusRow]], above: float, out: Selection) -> list[list[CorpusRow]]:
    rows = [row for run in runs for row in run]
    found = near_duplicates(rows, above)
    dropped = {rows[i].name: f"{rows[i].name}: {share:.0%} of {rows[j].name}" for i, (j, share) in found.items()}
    out.excluded["near_duplicate"] += list(dropped.values())
    kept = [[row for row in run if row.name not in dropped] for run in runs]
    return [run for run in kept if run]


def _capped(runs: list[list[CorpusRow]], spec: Spec, out: Selection) -> list[list[CorpusRow]]:
    """At most ``max_per_task`` runs of each task, drawn by the seed; the order stays."""
    if spec.max_per_task is None:
        return runs
    by_task: defaultdict[str, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        by_task[run[0].task].append(i)
    kept: set[int] = set()
    for members in by_task.values():
        drawn = sorted(members, key=lambda i: draw(spec.seed, "cap", runs[i][0].name))
        kept.update(drawn[: spec.max_per_task])
        out.excluded["over_the_cap"] += [runs[i][0].name for i in sorted(drawn[spec.max_per_task :])]
    return [run for i, run in enumerate(runs) if i in kept]
