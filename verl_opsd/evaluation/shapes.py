"""What evaluation hands to whoever shows it: rates, standings, behaviour tables and comparisons, as plain frozen data.

Every number carries its denominator, and names the episodes behind it. ``dataclasses.asdict`` of each is JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: How a pair's two patches met, in the order in which tables show it. The harness calls the first three ``clean``.
MERGES = ("clean_both", "clean_one_empty", "both_empty", "identical", "conflicts", "missing_input", "error")

#: Who did a pair's work, from each patch alone on both suites; ``ungraded``: the patches were not graded alone.
WORK = ("one_did_both", "handoff", "split", "partial", "none", "ungraded")

#: What became of a feature; exclusive, the first that holds in this order.
CAUSES = ("passed", "merge_conflict", "submitted_nothing", "near_miss", "wrong_code")

#: A share's way from the base, seen from the teacher: ``overshot`` went in its direction and past it, ``still`` moved by at most half
#: a percentage point.
DRIFTS = ("toward", "overshot", "away", "still")

Verdict = Literal["better", "worse", "not shown", "inside the floor", "cannot be shown with this design"]


@dataclass(frozen=True)
class Rate:
    """A share of a count.

    Attributes:
        passed, total: numerator and denominator; ``passed <= total``.
        low, high: ends of the 95% Wilson interval; None where ``total`` is 0.
        of: what the denominator counts, in words ("features of scored pairs").
        hits: ids of the episodes that the numerator counts, sorted; one that counts twice (two features) stands once.
    """

    passed: int
    total: int
    low: float | None
    high: float | None
    of: str
    hits: tuple[str, ...] = ()

    @property
    def value(self) -> float | None:
        """The share, 0 to 1; None without a denominator."""
        return self.passed / self.total if self.total else None


@dataclass(frozen=True)
class Cell:
    """One pair of the per-task grid under one model: all of its seeds together.

    Attributes:
        pair: key of the pair, ``repo/task<ID>/f<A>_f<B>``.
        features, of: features passed, and how many could (2 a scored seed).
        merges: outcome (:data:`MERGES`) -> seeds.
        minutes, messages: means over the scored seeds; None where none was scored.
        void: seeds that an infrastructure fault ended.
        episodes: ids of the seeds' episodes.
    """

    pair: str
    features: int
    of: int
    merges: dict[str, int]
    minutes: float | None
    messages: float | None
    void: int
    episodes: tuple[str, ...]


@dataclass(frozen=True)
class Standing:
    """One row of the standings: one model (or one version of a policy) under one contract.

    Attributes:
        model: its name in tables.
        contract: hash of the contract that its episodes ran under.
        parameters, active_parameters: of the model, in all and used a token; None where they are not known.
        serving: what served it (engine, parsers, limits, layout); ``{"manifest": "unverified"}`` where nobody said.
        planned, ran, scored: episodes; ``planned`` is None where no plan was recorded.
        void: fault kind -> episodes that it ended, in no denominator below but those of agents; ``answer_in_prompt``: episodes in
            which an agent read an answer, in none at all.
        features: features passed of 2 a scored pair, by the harness' own verdict. features_strict: by the strict one, which reward
            follows. pairs: both passed for the harness. pairs_any: at least one.
        non_empty, submitted, opened_pr: agents, of all agents that ended their run (those of a pair whose grading
            failed too: what they handed in is known).
        median_patch_bytes: over the same agents, empty patches as 0. median_non_empty_bytes: over the others.
        patch_kb_per_pair: 1000 bytes.
        merges: outcome (:data:`MERGES`) -> scored pairs. work: who did it (:data:`WORK`) -> scored pairs.
        causes: cause (:data:`CAUSES`) -> features of scored pairs. exits: status as the harness names it -> agents.
        minutes_per_pair, messages_per_pair: means over the scored pairs. median_steps: over the agents.
        policy_tokens_per_pair, prompt_tokens_per_pair: written and read (each call's whole prompt), means; None where no
            token counts were recorded. cost_per_pair: in the unit that the episodes recorded, None where none was.
        grid: one cell a pair, sorted by pair.
        differences: where the two verdicts differ, a line a feature.
        stamps: reasons why these are not scores of the benchmark that the tasks are named after.
        episodes: ids of all episodes that ran, sorted.
        invalidated: invalidations that reach the row, in words. doubts: whether its raw logs are gone, changed, or unknown to the
            evidence, in words.
    """

    model: str
    contract: str
    parameters: int | None
    active_parameters: int | None
    serving: dict[str, str]
    planned: int | None
    ran: int
    scored: int
    void: dict[str, int]
    features: Rate
    features_strict: Rate
    pairs: Rate
    pairs_any: Rate
    non_empty: Rate
    submitted: Rate
    opened_pr: Rate
    median_patch_bytes: float | None
    median_non_empty_bytes: float | None
    patch_kb_per_pair: float | None
    merges: dict[str, int]
    work: dict[str, int]
    causes: dict[str, int]
    exits: dict[str, int]
    minutes_per_pair: float | None
    messages_per_pair: float | None
    median_steps: float | None
    policy_tokens_per_pair: float | None
    prompt_tokens_per_pair: float | None
    cost_per_pair: float | None
    grid: tuple[Cell, ...]
    differences: tuple[str, ...] = ()
    stamps: tuple[str, ...] = ()
    episodes: tuple[str, ...] = ()
    invalidated: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """One model against another on the pairs that both were scored on.

    Attributes:
        metric: ``pairs``, ``features`` or the name of a behaviour metric.
        baseline, model: names of the two; ``value_*`` their values on the common pairs, ``difference`` model - baseline.
        low, high: 95% interval of the difference; None where the design gives none.
        common, dropped: pairs that both have, and pairs that only one has (left out).
        seeds: fewest seeds a pair of the two.
        test: name of the test; ``p`` its two-sided value, ``p_adjusted`` after ``correction`` over the table's rows.
        floor: largest difference between re-runs of the same weights, in the metric's unit; None where none was measured.
        floor_of: what the floor holds ("2 re-runs on one node: sampling and serving variance").
        smallest: smallest true difference that this design shows with the stated power; None: no difference can.
        verdict: what may be said; ``sentence`` says it with its numbers.
    """

    metric: str
    baseline: str
    model: str
    value_baseline: float
    value_model: float
    difference: float
    low: float | None
    high: float | None
    common: int
    dropped: int
    seeds: int
    test: str
    p: float
    p_adjusted: float
    correction: str
    floor: float | None
    floor_of: str
    smallest: float | None
    verdict: Verdict
    sentence: str


@dataclass(frozen=True)
class BehaviourValue:
    """A metric's value for one model.

    Attributes:
        value: in the metric's unit; None where the denominator is 0.
        numerator, denominator: of shares and means; None for medians (``denominator`` then counts the values).
        low, high: 95% Wilson interval of a share; None for others.
        episodes: ids of the episodes with at least one case of the numerator, sorted; at most those of the run.
    """

    value: float | None
    numerator: float | None
    denominator: int
    low: float | None = None
    high: float | None = None
    episodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BehaviourMetric:
    """One row of a behaviour table.

    Attributes:
        key: stable identifier (``near_duplicate_share``). title: for tables.
        group: communication, method, actions, merges, endgame, loops, protocol, outcome.
        definition: formula with its denominator. unit: share, count, characters, bytes, minutes, ...
        reference: value of the seeds' corpus column; None where it has none.
        values: model -> value, in the table's order of models.
        constant: all of two or more models have the same value: the row tells nothing apart.
        drift: model -> how it moved from the base, where base and teacher are named (:data:`DRIFTS`).
    """

    key: str
    title: str
    group: str
    definition: str
    unit: str
    reference: float | None
    values: dict[str, BehaviourValue]
    constant: bool
    drift: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stratum:
    """Pairs of one range of message volume, all models pooled: ``pairs``, conflicts and features passed among them."""

    model: str
    low: int
    high: int | None
    pairs: int
    conflicts: Rate
    features: Rate


@dataclass(frozen=True)
class BehaviourTable:
    """Behaviour of several models, from definitions of one version.

    Attributes:
        version: of the definitions and their regular expressions; tables of different versions are not compared.
        models: names, in order; the first is the base where ``base`` names none.
        pairs: model -> scored pairs. void: model -> episodes left out for an infrastructure fault.
        metrics: rows, in order of group.
        strata: message-volume strata; model ``all`` pools them.
        distance: model -> mean over the reference column's metrics of |ln((value + 0.01) / (reference + 0.01))|: 0 on the reference,
            0.69 a factor of two away; None where a metric has no value.
    """

    version: str
    models: tuple[str, ...]
    pairs: dict[str, int]
    void: dict[str, int]
    metrics: tuple[BehaviourMetric, ...]
    strata: tuple[Stratum, ...]
    distance: dict[str, float | None] = field(default_factory=dict)
    base: str | None = None
    teacher: str | None = None
