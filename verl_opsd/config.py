"""The `opsd` section of the configuration: frozen dataclasses, unknown keys and contradictions are refused."""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from verl_opsd.config_teacher import TeacherConfig, teacher_contradictions
from verl_opsd.contract import FOUND, SCHEMA, EvalContract
from verl_opsd.cooperbench.reward import RewardConfig
from verl_opsd.errors import OpsdError

if TYPE_CHECKING:
    from verl_opsd.distill.loss import LossSpec


@dataclass(frozen=True)
class TasksConfig:
    """Which pairs are trained on and which are evaluated.

    Attributes:
        dataset: ``pocket`` (ships with the package) or a folder in CooperBench's layout.
        train, eval: names or paths of subsets; an evaluation has no ``train``.
        test: the locked test split, which no run trains or evaluates on; null: there is none.
        look: why this run may evaluate on the locked split; recorded in its evidence. null: it may not.
        prepare: prepare and qualify missing tasks before the run; only for ``pocket``, where it takes seconds.
        disjoint: what no two of the three splits may share: ``repo``, ``task`` or ``feature``.
        max_train, max_eval: the first pairs of a subset only; null takes all.
    """

    dataset: str
    train: str | None
    eval: str
    test: str | None = None
    look: str | None = None
    prepare: bool = False
    disjoint: Literal["repo", "task", "feature"] = "repo"
    max_train: int | None = None
    max_eval: int | None = None


@dataclass(frozen=True)
class BriefConfig:
    """The teacher's privileged context and where it stands in the teacher's view.

    Attributes:
        name: a registered brief, or several joined by ``+``.
        files: folder of authored workflows, one a pair; for the brief ``workflow`` and no other.
        max_view_tokens: tokens of one pass of the teacher; null: the positions that the scoring model has.
        too_long: what happens to a branch whose view is longer: ``refuse`` stops at launch where one may come, ``leave_out`` gives
            the branch no row and records it, ``window`` scores it in windows and records what each holds (``privilege.windows``).
        window_context: of ``window``, tokens of the branch that a window holds before its first scored reply, at least.
    """

    name: str
    placement: Literal["system", "last_user"] = "system"
    user_turn: Literal["block", "message"] = "block"
    allow_answer: bool = False
    files: str | None = None
    max_view_tokens: int | None = None
    too_long: Literal["refuse", "leave_out", "window"] = "refuse"
    window_context: int | None = None


@dataclass(frozen=True)
class ActorBriefConfig:
    """A brief in the actors' own prompts, for evaluating a context or collecting with a hint; ``none``: there is none.

    Attributes:
        name: a registered brief, or several joined by ``+``.
        where: which episodes: ``eval``, ``train``, ``both``. Before training a hint is taken out of the ids again.
        allow_answer: let it hold answers; such episodes count in no standings.
        files: as in ``BriefConfig``.
    """

    name: str = "none"
    where: Literal["eval", "train", "both"] = "eval"
    allow_answer: bool = False
    files: str | None = None


@dataclass(frozen=True)
class LossConfig:
    """The objective; the formulas are in ``verl_opsd.distill``.

    Attributes:
        divergence: reverse_kl, forward_kl, jsd (``beta``), skewed_reverse_kl, skewed_forward_kl (``skew``), or one that was
            added to ``distill.loss.ANALYTIC``; from the sampled token alone: policy_gradient (``trust``), k2, k3; nll, the negative
            log-likelihood of the student's own tokens, which has no teacher.
        support: ``full``, or ``student_topk``, ``teacher_topk``, ``union_topk`` with ``top_k`` tokens a side and one tail bucket.
        trust: of policy_gradient, range of importance ratios outside which a token is masked.
        max_log_ratio: of k3, log-ratio in nats beyond which the pull stays the same; null stops the run where exp would overflow.
        reduction: token, turn, branch or episode mean over the rows of one optimizer step.
        anchor: weight of the same divergence to the student's own base; 0 turns it off.
        anchor_positions: where the anchor pulls: ``policy``: every policy position; ``loss``: those that carry the divergence (a threshold
            aside). Its denominator is their number, by ``reduction``.
        task_reward_coef: weight of PPO's clipped term with the episodes' reward (``actor.clip_ratio_low``, ``_high``, ``_c`` are its
            bounds); the advantage is the reward minus the mean of the round's other episodes. 0 turns it off.
        drift: measure the divergence from the student's own base at every policy position (for one more pass over the student's
            ids a round); an anchor does so anyway.
        threshold: keep only positions whose detached divergence is above a number of nats (:class:`ThresholdConfig`).
        gate: surprisal gate sigmoid(kappa * (log pS - gamma)); enters no denominator.
        clip: largest absolute weight of a position's pull; see ``distill.weights.Clip``.
        class_weights: weight of each token class; enters the denominator.
        turn_half_life: tokens of a turn over which the weight of its positions halves; enters the denominator.
        prefix_half_life: tokens of prefix before a turn over which its weight halves; enters the denominator.
        max_prefix: only turns whose prefix is shorter than this many tokens carry loss.
        turn_kinds: kinds of turns that carry loss. The others' replies stay policy positions: measured, and under the anchor.
        turns: half-open ranges of an agent's turns that carry loss; null: all.
        segments: half-open ranges of a branch's tokens, counted from its first, that carry loss; null: all.
        chunk: loss positions per chunk of the vocabulary head; null: as many as its kernels are fastest with below 1 GB.
        epochs: passes over the rows of a round.
        episodes_per_update: episodes of one optimizer step; null takes all of the round.
    """

    divergence: str = "reverse_kl"
    beta: float | None = None
    skew: float | None = None
    support: Literal["full", "student_topk", "teacher_topk", "union_topk"] = "full"
    top_k: int | None = None
    trust: tuple[float, ...] | None = None
    max_log_ratio: float | None = None
    reduction: Literal["token", "turn", "branch", "episode"] = "token"
    anchor: float = 0.0
    anchor_positions: Literal["policy", "loss"] = "policy"
    task_reward_coef: float = 0.0
    drift: bool = False
    threshold: ThresholdConfig | None = None
    gate: GateConfig | None = None
    clip: float | None = None
    class_weights: ClassWeights = field(default_factory=lambda: ClassWeights())
    turn_half_life: float | None = None
    prefix_half_life: float | None = None
    max_prefix: int | None = None
    turn_kinds: tuple[Literal["policy", "malformed"], ...] = ("policy", "malformed")
    turns: tuple[tuple[int, ...], ...] | None = None
    segments: tuple[tuple[int, ...], ...] | None = None
    chunk: int | None = None
    epochs: int = 1
    episodes_per_update: int | None = None

    def spec(self) -> LossSpec:
        """The library's loss of this configuration.

        Raises:
            OpsdError: parameters that are missing, out of range or would be ignored.
        """
        from verl_opsd.distill.loss import ANALYTIC, SAMPLED_OBJECTIVES, LossSpec
        from verl_opsd.distill.weights import Clip, SurprisalGate, Threshold, Weight

        if self.divergence == "k1":
            raise OpsdError(
                "opsd.loss.divergence=k1",
                "the gradient of log p - log q at a sampled token is 0 in expectation: the run would learn noise",
                "use policy_gradient, whose gradient is that of k1's expectation",
            )
        if self.divergence not in (*ANALYTIC, *SAMPLED_OBJECTIVES, "nll"):
            raise OpsdError(
                f"opsd.loss.divergence={self.divergence!r}",
                f"opsd.loss.divergence is one of {', '.join((*sorted(ANALYTIC), *SAMPLED_OBJECTIVES, 'nll'))}",
                "choose one of them, or add yours to verl_opsd.distill.loss.ANALYTIC from a module in VERL_USE_EXTERNAL_MODULES",
            )
        weights: list[Weight] = []
        if self.threshold is not None and self.threshold.taken == "current":
            weights.append(Threshold(self.threshold.above))
        if self.gate is not None:
            weights.append(SurprisalGate(self.gate.kappa, self.gate.gamma))
        if self.clip is not None:
            weights.append(Clip(self.clip))
        if self.trust is not None and len(self.trust) != 2:
            raise OpsdError(f"opsd.loss.trust={list(self.trust)}", "a range has two ends", "give [lowest, highest] ratio")
        trust = None if self.trust is None else (self.trust[0], self.trust[1])
        return LossSpec(
            self.divergence, self.beta, self.skew, self.support, self.top_k, tuple(weights), trust, self.max_log_ratio
        )


@dataclass(frozen=True)
class ThresholdConfig:
    """Threshold mask: positions of at most ``above`` nats get weight 0.

    Attributes:
        above: nats.
        taken: ``collection``: at the weights before the round's first update, once for all of its epochs (one more pass of
            teacher and student); ``current``: at the weights of each step.
        denominator: ``kept``: the mean is over the kept positions; ``all``: over all of them, as if the others were 0.
    """

    above: float
    taken: Literal["collection", "current"] = "current"
    denominator: Literal["kept", "all"] = "all"


@dataclass(frozen=True)
class GateConfig:
    """Surprisal gate: weight sigmoid(kappa * (log p_student(token) - gamma))."""

    kappa: float
    gamma: float


@dataclass(frozen=True)
class ClassWeights:
    """Weight of each class of policy tokens; 0 takes a class out of the loss and its denominator."""

    think: float = 1.0
    message: float = 1.0
    command: float = 1.0
    code: float = 1.0
    other: float = 1.0


@dataclass(frozen=True)
class GatesConfig:
    """Thresholds written down before the run; all fail closed. Divergences in nats a token, means over loss positions;
    ``publish_follow_min`` is a share of 1, for rollout servers of verl's; ``identity_end_max`` is of runs whose teacher is the student's own
    base without a brief."""

    identity_max: float = 1e-6
    shifted_min: float = 1e-3
    brief_effect_min: float = 1e-6
    publish_kl_max: float = 1e-6
    identity_end_max: float = 1e-6
    publish_follow_min: float = 0.5


@dataclass(frozen=True)
class WorthConfig:
    """The worth-distilling gate: ``matrix`` is a file of ``opsd teacher-matrix``; ``override`` goes on without it or in spite of it, and
    is recorded with its reason."""

    matrix: str | None = None
    override: str | None = None


@dataclass(frozen=True)
class SandboxConfig:
    """Where agents' commands and hidden tests run.

    Attributes:
        allow_unsafe: permits ``process``, which isolates nothing.
        graders: processes that grade, of each agent-loop worker; null: one for each pair at once, at most half of the processors.
    """

    backend: Literal["bubblewrap", "process", "docker"] = "bubblewrap"
    allow_unsafe: bool = False
    graders: int | None = None


@dataclass(frozen=True)
class BudgetConfig:
    """What a run's episodes may cost, by an estimate before the start.

    Attributes:
        minutes_per_pair: that an episode with its grade takes, measured; null: what the contract's limits permit at most.
        sandbox_usd_per_hour: price of one sandbox.
        max_hours, max_gpu_hours, max_sandbox_usd: a run whose estimate is above one is refused; null: no limit.
    """

    minutes_per_pair: float | None = None
    sandbox_usd_per_hour: float = 0.0
    max_hours: float | None = None
    max_gpu_hours: float | None = None
    max_sandbox_usd: float | None = None


@dataclass(frozen=True)
class EvaluationConfig:
    """Full-set evaluation (mode ``evaluate``).

    Attributes:
        seeds: runs of each pair.
        retries: how often an episode that an infrastructure fault ended runs again before it is reported as void.
        alone: grade each patch alone on both suites too: who did the work.
    """

    seeds: int = 1
    retries: int = 2
    alone: bool = True


@dataclass(frozen=True)
class CanaryConfig:
    """Limits on how the policy acts while it is trained (``evaluation.canary``).

    Attributes:
        every: rounds between checks, each over the training episodes of these rounds; null: no check.
        limits: file of limits; null: the one that ships with the package.
    """

    every: int | None = None
    limits: str | None = None


@dataclass(frozen=True)
class OpsdConfig:
    """The whole section.

    Attributes:
        varies: the one field of the contract in which a corpus, or the jobs of a sweep, may differ; null: none.
        threads: threads of each worker process on the host processor; null: Ray's default, one, or OMP_NUM_THREADS.
        dry_run: check everything, print what the episodes will take, and stop with exit code 0.
        predictions: file of predictions (``evidence.predictions``), written down before anything starts.
    """

    recipe: str
    scale: Literal["local", "smollm", "cpu8", "gpu1", "gpu2", "gpu8"]
    mode: Literal["online", "offline", "evaluate"]
    tasks: TasksConfig
    brief: BriefConfig
    teacher: TeacherConfig
    loss: LossConfig
    contract: EvalContract
    gates: GatesConfig = field(default_factory=GatesConfig)
    worth: WorthConfig = field(default_factory=WorthConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    dry_run: bool = False
    actor_brief: ActorBriefConfig = field(default_factory=ActorBriefConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    student: Literal["", "tiny", "smollm"] = ""
    corpus: str | None = None
    varies: str | None = None
    threads: int | None = None
    predictions: str | None = None

    @classmethod
    def parse(cls, values: dict[str, Any]) -> OpsdConfig:
        """Builds the section from plain values.

        Raises:
            OpsdError: an unknown or missing key, a value of the wrong type, or two keys that contradict each other.
        """
        config = _build(cls, values, "opsd")
        _contradictions(config)
        return config


def build_section(cls: type, values: Any, where: str) -> Any:
    """A frozen dataclass of a section from plain values, as :meth:`OpsdConfig.parse` builds its own.

    Raises:
        OpsdError: an unknown or missing key, or a value of the wrong type.
    """
    return _build(cls, values, where)


def _build(cls: type, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise OpsdError(f"{where}={values!r}", f"{where} is a group of keys", f"give {where} as key: value pairs")
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise OpsdError(
            f"unknown key {', '.join(f'{where}.{k}' for k in unknown)}",
            f"the keys of {where} are {', '.join(sorted(known))}",
            "correct the spelling or remove the key",
        )
    missing = [
        n
        for n, f in known.items()
        if n not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise OpsdError(
            f"{', '.join(f'{where}.{k}' for k in missing)} not set", "these keys have no default", "set them in the recipe"
        )
    return cls(**{k: _value(hints[k], v, f"{where}.{k}") for k, v in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """``value`` as ``hint``; only lossless conversions (int to float, list to tuple) are made."""
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _value(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value in args:
            return value
        raise OpsdError(f"{where}={value!r}", f"{where} is one of {', '.join(map(str, args))}", "choose one of them")
    if origin is dict and isinstance(value, dict):
        return {str(k): _value(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(args[0], v, where) for v in value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if (
        hint is not float
        and isinstance(hint, type)
        and isinstance(value, hint)
        and not (hint is int and isinstance(value, bool))
    ):
        return value
    name = getattr(hint, "__name__", str(hint))
    raise OpsdError(
        f"{where}={value!r}", f"{where} is of type {name}{', finite' if hint is float else ''}", f"give a value of type {name}"
    )


def _contradictions(c: OpsdConfig) -> None:
    def refuse(what: str, rule: str, way_out: str) -> None:
        raise OpsdError(what, rule, way_out)

    teacher_contradictions(c.teacher, c.loss)
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
    window, context, limit = c.brief.too_long == "window", c.brief.window_context, c.brief.max_view_tokens
    if (context is not None) != window or (context is not None and not 0 <= context < (limit or math.inf)):
        refuse(
            f"opsd.brief.too_long={c.brief.too_long} window_context={context} max_view_tokens={limit}",
            "too_long=window, and nothing else, needs window_context: tokens from 0 up to less than a view may have",
            "set both keys, e.g. window_context to a quarter of max_view_tokens, or leave both out",
        )
    if c.tasks.look is not None and (c.tasks.test is None or len(c.tasks.look.split()) < 3):
        refuse(
            f"opsd.tasks.look={c.tasks.look!r} with opsd.tasks.test={c.tasks.test}",
            "a look at the locked test split is recorded with its reason",
            "name the split in opsd.tasks.test, and give the reason in a few words",
        )
    if (c.mode == "evaluate") != (c.tasks.train is None):
        refuse(
            f"opsd.tasks.train={c.tasks.train} with opsd.mode={c.mode}",
            "training has training pairs, and an evaluation would ignore them",
            "set opsd.tasks.train for training, and leave it out of +recipe=full_eval",
        )
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
    if c.mode != "evaluate" and c.evaluation != EvaluationConfig():
        refuse(f"opsd.evaluation with opsd.mode={c.mode}", "only +recipe=full_eval reads these keys", "leave them out")
    if c.evaluation.seeds < 1 or c.evaluation.retries < 0:
        refuse(f"opsd.evaluation {c.evaluation}", "seeds >= 1 and retries >= 0", "correct the value")
    if c.worth.override is not None and len(c.worth.override.split()) < 3:
        refuse(f"opsd.worth.override={c.worth.override!r}", "an override is recorded with its reason", "give it in a few words")
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
    c.loss.spec()
    if (
        c.loss.anchor < 0
        or c.loss.epochs < 1
        or (c.loss.chunk is not None and c.loss.chunk < 1)
        or (c.loss.episodes_per_update is not None and c.loss.episodes_per_update < 1)
    ):
        refuse(
            f"opsd.loss anchor={c.loss.anchor} epochs={c.loss.epochs} chunk={c.loss.chunk} "
            f"episodes_per_update={c.loss.episodes_per_update}",
            "anchor >= 0; epochs, chunk and episodes_per_update >= 1",
            "correct the value",
        )
    for name, least in (
        ("threads", 1),
        ("tasks.max_train", 1),
        ("tasks.max_eval", 1),
        ("brief.max_view_tokens", 1),
        ("loss.max_prefix", 1),
        ("sandbox.graders", 1),
    ):
        value = operator.attrgetter(name)(c)
        if value is not None and value < least:
            refuse(f"opsd.{name}={value}", f"{name} is at least {least}, or null", "correct the value")
    if min(dataclasses.astuple(c.gates)) < 0:
        refuse(f"opsd.gates {c.gates}", "thresholds are not negative", "correct the value")
    for key in dataclasses.fields(c.budget):
        value = getattr(c.budget, key.name)
        if value is not None and (value < 0 or (value == 0 and key.name == "minutes_per_pair")):
            refuse(
                f"opsd.budget.{key.name}={value}", "minutes are above 0, prices and limits not negative", "correct the value"
            )
    for name in ("turn_half_life", "prefix_half_life"):
        value = getattr(c.loss, name)
        if value is not None and not value > 0:
            refuse(f"opsd.loss.{name}={value}", "a half-life is above 0 tokens", "raise it, or leave it out (null)")
    t = c.loss.threshold
    if c.loss.task_reward_coef < 0:
        refuse(f"opsd.loss.task_reward_coef={c.loss.task_reward_coef}", "a weight is at least 0", "0 turns the term off")
    if (c.loss.spec().sampled and c.loss.divergence != "nll") or c.loss.task_reward_coef > 0:
        sampling = (c.contract.temperature, c.contract.top_p, c.contract.top_k)
        if sampling != (1.0, 1.0, -1):
            refuse(
                f"opsd.loss divergence={c.loss.divergence} task_reward_coef={c.loss.task_reward_coef} with temperature={sampling[0]} "
                f"top_p={sampling[1]} top_k={sampling[2]}",
                "an estimator from sampled tokens is an expectation over the policy's own, whole distribution",
                "sample at temperature 1 without top_p and top_k, or use a divergence over the vocabulary, which needs neither",
            )
        if t is not None and c.loss.spec().sampled:
            refuse(
                f"opsd.loss.threshold with divergence={c.loss.divergence}",
                "one token's estimate may be of either sign: a threshold on it keeps tokens by luck",
                "use a divergence over the vocabulary",
            )
    if t is not None:
        if t.above < 0:
            refuse(f"opsd.loss.threshold.above={t.above}", "divergences are at least 0", "set it to 0 or more")
        if (t.taken, t.denominator) == ("current", "kept") and (
            c.loss.reduction != "token" or c.loss.anchor > 0 or c.loss.task_reward_coef > 0
        ):
            refuse(
                f"opsd.loss.threshold taken=current denominator=kept with reduction={c.loss.reduction} anchor={c.loss.anchor} "
                f"task_reward_coef={c.loss.task_reward_coef}",
                "what the current weights keep is known after a step's last micro-batch: its whole gradient is divided by one number",
                "use threshold.taken=collection or threshold.denominator=all, or reduction=token without an anchor or a task reward",
            )
    for name in ("turns", "segments"):
        spans = getattr(c.loss, name)
        if spans is not None and (not spans or any(len(s) != 2 or not 0 <= s[0] < s[1] for s in spans)):
            refuse(
                f"opsd.loss.{name}={[list(s) for s in spans]}",
                "a list of half-open ranges [first, end] with 0 <= first < end",
                "correct the ranges, or leave the key out (null)",
            )
    if c.loss.divergence in ("k2", "k3") and (
        c.mode == "offline" or c.loss.epochs > 1 or c.loss.episodes_per_update is not None
    ):
        refuse(
            f"opsd.loss.divergence={c.loss.divergence} with mode={c.mode} epochs={c.loss.epochs} "
            f"episodes_per_update={c.loss.episodes_per_update}",
            "k2 and k3 are right for tokens of the very policy that is trained: fresh ones, for one optimizer step a round",
            "use policy_gradient, which weighs tokens of an earlier policy by their ratio, or a divergence over the vocabulary",
        )
    if c.loss.anchor == 0 and c.loss.anchor_positions != "policy":
        refuse(
            f"opsd.loss.anchor_positions={c.loss.anchor_positions} without opsd.loss.anchor",
            "without an anchor nothing reads its positions",
            "set opsd.loss.anchor, or leave the key out",
        )
    if c.loss.divergence == "nll" and (c.teacher.kind != "self" or c.brief.name != "none" or c.loss.anchor > 0 or c.loss.drift):
        refuse(
            f"opsd.loss.divergence=nll with teacher={c.teacher.kind} brief={c.brief.name} anchor={c.loss.anchor} drift={c.loss.drift}",
            "the likelihood of the student's own tokens has no teacher; teacher, brief and anchor would be ignored",
            "use +arm=sft, or a divergence from a teacher",
        )
    if not c.loss.turn_kinds:
        refuse("opsd.loss.turn_kinds=[]", "some kind of turn carries the loss", "name policy, malformed or both")
    weights = dataclasses.astuple(c.loss.class_weights)
    if min(weights) < 0 or max(weights) == 0:
        refuse(f"opsd.loss.class_weights={c.loss.class_weights}", "weights >= 0, one of them above 0", "correct them")
    found = {name: getattr(c.contract, name) for name in FOUND if getattr(c.contract, name)}
    fixed = {"grader": "merged-tree", "reasoning_parser": "think_tags", "cost_limit": 0.0, "schema": SCHEMA}
    other = {name: getattr(c.contract, name) for name, value in fixed.items() if getattr(c.contract, name) != value}
    if found or other:
        refuse(
            "".join(f"opsd.contract.{k}={v} " for k, v in {**other, **found}.items()).rstrip(),
            f"{', '.join(f'{k} is {v}' for k, v in fixed.items())}; {', '.join(FOUND)} are found out at the start",
            "leave these fields out",
        )
    if c.varies is not None and (c.varies not in c.contract.as_dict() or c.varies == "schema"):
        refuse(
            f"opsd.varies={c.varies}",
            f"a comparison varies one field of the contract: {', '.join(c.contract.as_dict())}",
            "name one of them, or leave it out",
        )
