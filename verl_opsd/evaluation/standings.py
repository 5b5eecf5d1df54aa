"""Standings: what a model scored under one contract, with every denominator, and where its failures lie."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.alone import Alone, read_alone, who_did_it
from verl_opsd.evaluation.compare import Outcomes
from verl_opsd.evaluation.outcomes import causes, is_empty, merge_of, patch_bytes
from verl_opsd.evaluation.shapes import CAUSES, MERGES, WORK, Cell, Rate, Standing
from verl_opsd.evaluation.statistics import rate
from verl_opsd.evidence.chain import LOG, lines, verify
from verl_opsd.evidence.graded import State, check_episodes, doubts, graded_versions
from verl_opsd.evidence.invalidation import reach
from verl_opsd.rundir import read_json
from verl_opsd.tokens.records import AgentOutcome, Episode

UNVERIFIED = {"manifest": "unverified"}


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model beside its episodes; see :class:`~verl_opsd.evaluation.shapes.Standing` for the fields.

    ``prices``: cost of a million prompt and a million policy tokens; None where nobody said.
    """

    parameters: int | None = None
    active_parameters: int | None = None
    serving: dict[str, str] = field(default_factory=lambda: dict(UNVERIFIED))
    planned: int | None = None
    prices: tuple[float, float] | None = None
    alone: Mapping[str, Alone] = field(default_factory=dict)
    invalidated: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


#: The lines of a run's log, and the state of each episode (``evidence.graded.check_episodes``).
Checked = tuple[Sequence[Mapping[str, Any]], Mapping[str, tuple[State, str]]]


def model_info(
    run: Path, episodes: Sequence[Episode], split: str, version: int | None = None, checked: Checked | None = None
) -> ModelInfo:
    """What a run directory says of its model; the default where it says nothing (``evaluation.json``, ``meta.json``,
    ``contract.json``, ``alone/``), and what its evidence says of the episodes.

    Args:
        split, version: that the episodes are all of; ``version=None``: of every version.
        checked: where the caller has it at hand.
    """
    if checked is None:
        log = lines(run)
        checked = log, check_episodes(run, log)
    contract = run / "contract.json"
    meta, said = ({} if not p.is_file() else read_json(p) for p in (run / "meta.json", run / "evaluation.json"))
    said = meta.get("model_size", {}) | said
    serving = said.get("serving")
    if serving is None and contract.is_file():
        values = read_json(contract)
        keys = ("serving", "tool_parser", "reasoning_parser", "step_limit", "max_tokens", "context_length", "temperature")
        serving = {k: str(values[k]) for k in keys if k in values}
    alone = {e.episode_id: found for e in episodes if (found := read_alone(run, e.episode_id)) is not None}
    return ModelInfo(
        invalidated=reach(run, {e.model_version for e in episodes} | ({version} if version is not None else set())),
        doubts=(*_edits(run), *doubts(*checked, [e.episode_id for e in episodes], split, version)),
        parameters=said.get("parameters"),
        active_parameters=said.get("active_parameters"),
        serving=serving or dict(UNVERIFIED),
        planned=len(said["planned"]) if "planned" in said else None,
        prices=tuple(said["prices"]) if said.get("prices") else None,
        alone=alone,
    )


def _edits(run: Path) -> tuple[str, ...]:
    """What is to be said of every row of a run whose log was edited: a mark may be missing from it."""
    found = [f for f in verify(run)[1] if not f.killed] if (run / LOG).is_file() else []
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return (f"unverifiable: {LOG} is not as it was written: {found[0]}{more}",) if found else ()


def by_version(episodes: Iterable[Episode], graded: Iterable[int] = ()) -> dict[int, list[Episode]]:
    """Policy version -> its episodes; what a fault ended before its first turn knows none and counts to the last version.

    Args:
        graded: versions that were scored, whether their episodes are still there or not.
    """
    episodes = list(episodes)
    versions = sorted({e.model_version for e in episodes if e.scored} | set(graded) or {e.model_version for e in episodes})
    out: dict[int, list[Episode]] = {v: [] for v in versions}
    for e in episodes:
        out[e.model_version if e.model_version in out else versions[-1]].append(e)
    return out


def rows_of_run(episodes: Sequence[Episode], log: Sequence[Mapping[str, Any]]) -> list[tuple[str, int | None, list[Episode]]]:
    """What the tables of one run are about: key, policy version, episodes.

    ``train``: the training episodes, of all versions (None). ``eval``: the last version that was evaluated; ``eval@N``: version N.
    A version that ``log`` knows scored episodes of has a row without episodes once all of them are gone.
    """
    train = [e for e in episodes if e.split == "train"]
    versions = by_version((e for e in episodes if e.split == "eval"), graded_versions(log, "eval"))
    rows: list[tuple[str, int | None, list[Episode]]] = (
        [("train", None, train)] if train or graded_versions(log, "train") else []
    )
    return rows + [("eval" if v == max(versions) else f"eval@{v}", v, own) for v, own in versions.items()]


def standing(model: str, episodes: Iterable[Episode], info: ModelInfo | None = None) -> Standing:
    """One row of the standings. A model whose agents have all failed on infrastructure has a row without denominators.

    Raises:
        OpsdError: episodes of several contracts, or the same episode twice.
    """
    info = info or ModelInfo()
    episodes = sorted(episodes, key=lambda e: e.episode_id)
    contracts = {e.contract_hash for e in episodes}
    twice = [k for k, n in Counter(e.episode_id for e in episodes).items() if n > 1]
    if len(contracts) > 1 or twice:
        raise OpsdError(
            f"{model}: {len(contracts)} contracts, {len(twice)} episodes twice",
            "a row counts each episode of one contract once",
            "give runs of different contracts names of their own",
        )
    void = Counter("answer_in_prompt" if e.scored else e.outcome.removeprefix("infra:") for e in episodes if not e.in_standings)
    ids = tuple(e.episode_id for e in episodes)
    episodes = [e for e in episodes if e.in_standings or not e.scored]
    scored = [e for e in episodes if e.scored]
    agents = [(e, a) for e in episodes for a in e.agents]
    passed = {e.episode_id: _passed(e) for e in scored}
    grades = [(e.episode_id, e.grade) for e in scored if e.grade is not None]
    earned = {k: sum(f.earned for f in g.features) for k, g in grades}

    def of_features(counts: Mapping[str, int]) -> Rate:
        return rate(sum(counts.values()), 2 * len(scored), "features of scored pairs", (k for k, n in counts.items() if n))

    def of_pairs(least: int) -> Rate:
        hits = [k for k, n in passed.items() if n >= least]
        return rate(len(hits), len(scored), "scored pairs", hits)

    def of_agents(hits: list[tuple[Episode, AgentOutcome]]) -> Rate:
        return rate(len(hits), len(agents), "agents that ended their run", (e.episode_id for e, _ in hits))

    sizes = [patch_bytes(a) for _, a in agents]
    merges = Counter(merge_of(g) for _, g in grades)
    work = Counter(who_did_it(e, info.alone.get(e.episode_id)) for e in scored)
    why = Counter(c for e in scored for c in causes(e))
    tokens = _tokens(scored)
    return Standing(
        model=model,
        contract=next(iter(contracts), ""),
        parameters=info.parameters,
        active_parameters=info.active_parameters,
        serving=info.serving,
        planned=info.planned,
        ran=len(ids),
        scored=len(scored),
        void=dict(sorted(void.items())),
        features=of_features(passed),
        features_strict=of_features(earned),
        pairs=of_pairs(2),
        pairs_any=of_pairs(1),
        non_empty=of_agents([(e, a) for e, a in agents if not is_empty(a, e.grade)]),
        submitted=of_agents([(e, a) for e, a in agents if a.status == "Submitted"]),
        opened_pr=of_agents([(e, a) for e, a in agents if a.opened_pr]),
        median_patch_bytes=_median(sizes),
        median_non_empty_bytes=_median([n for n in sizes if n]),
        patch_kb_per_pair=_mean([sum(map(patch_bytes, e.agents)) / 1000 for e in scored]),
        merges={k: merges[k] for k in MERGES if merges[k]},
        work={k: work[k] for k in WORK if work[k]},
        causes={k: why[k] for k in CAUSES if why[k]},
        exits=dict(sorted(Counter(a.status for _, a in agents).items())),
        minutes_per_pair=_mean([(e.t_end - e.t_start) / 60 for e in scored]),
        messages_per_pair=_mean([sum(a.sent_messages for a in e.agents) for e in scored]),
        median_steps=_median([a.steps for _, a in agents]),
        policy_tokens_per_pair=None if tokens is None else tokens[1],
        prompt_tokens_per_pair=None if tokens is None else tokens[0],
        cost_per_pair=None
        if tokens is None or info.prices is None
        else sum(t * p for t, p in zip(tokens, info.prices, strict=True)) / 1e6,
        grid=_grid(episodes),
        differences=tuple(f"{k}: {line}" for k, g in grades for line in g.differences),
        stamps=tuple(sorted({e.near_benchmark for e in episodes if e.near_benchmark})),
        episodes=ids,
        invalidated=info.invalidated,
        doubts=info.doubts,
    )


def outcomes(model: str, episodes: Iterable[Episode], metric: str = "pairs") -> Outcomes:
    """A model's scores by pair, one a scored seed, for a comparison.

    Args:
        metric: ``pairs``: 1 where both features passed, else 0; ``features``: share of the two that passed.

    Raises:
        OpsdError: another metric.
    """
    if metric not in ("pairs", "features"):
        raise OpsdError(f"metric {metric!r}", "models are compared on pairs or features", "choose one of the two")
    values: dict[str, list[float]] = defaultdict(list)
    for e in sorted(episodes, key=lambda e: e.episode_id):
        if e.in_standings:
            n = _passed(e)
            values[e.pair_key].append(float(n == 2) if metric == "pairs" else n / 2)
    return Outcomes(model, metric, {k: tuple(v) for k, v in sorted(values.items())})


def _passed(episode: Episode) -> int:
    assert episode.grade is not None
    return sum(f.passed for f in episode.grade.features)


def _tokens(scored: Sequence[Episode]) -> tuple[float, float] | None:
    """Means a pair of prompt and policy tokens; None where no episode tells."""
    counts = [found for e in scored if (found := _tokens_of(e)) is not None]
    return (fmean(a for a, _ in counts), fmean(b for _, b in counts)) if counts else None


def _tokens_of(episode: Episode) -> tuple[int, int] | None:
    """Prompt and policy tokens of recorded turns; without turns, what was counted of the server's ``usage``; in logs of others,
    what the replies in the history say of it, which leaves out those that the harness refused."""
    if episode.turns:
        return sum(t.prompt_len for t in episode.turns), sum(len(t.response_ids) for t in episode.turns)
    counted = [(a.prompt_tokens, a.completion_tokens) for a in episode.agents]
    if counted and all(a is not None and b is not None for a, b in counted):
        return sum(a or 0 for a, _ in counted), sum(b or 0 for _, b in counted)
    responses = [(m.get("extra") or {}).get("response") or {} for messages in episode.messages.values() for m in messages]
    usages = [u for r in responses if (u := r.get("usage"))]
    if not usages:
        return None
    return sum(int(u["prompt_tokens"]) for u in usages), sum(int(u["completion_tokens"]) for u in usages)


def _grid(episodes: Sequence[Episode]) -> tuple[Cell, ...]:
    by_pair: dict[str, list[Episode]] = defaultdict(list)
    for e in episodes:
        by_pair[e.pair_key].append(e)
    cells = []
    for key, seeds in sorted(by_pair.items()):
        scored = [e for e in seeds if e.scored]
        cells.append(
            Cell(
                pair=key,
                features=sum(map(_passed, scored)),
                of=2 * len(scored),
                merges=dict(sorted(Counter(merge_of(e.grade) for e in scored if e.grade is not None).items())),
                minutes=_mean([(e.t_end - e.t_start) / 60 for e in scored]),
                messages=_mean([sum(a.sent_messages for a in e.agents) for e in scored]),
                void=len(seeds) - len(scored),
                episodes=tuple(e.episode_id for e in seeds),
            )
        )
    return tuple(cells)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return float(median(values)) if values else None
