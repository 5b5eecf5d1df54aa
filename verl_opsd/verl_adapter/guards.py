"""Gates that run inside the trainer: start-up checks, the identity control with its negative, and the publish guard.

Thresholds come from ``opsd.gates``; every verdict is appended to ``evidence.jsonl``; a gate that fails stops the run.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir
from verl_opsd.verl_adapter import checks
from verl_opsd.verl_adapter.rollout import OWN_BACKENDS

#: Rows and tokens a rank that the identity control looks at; one row at least.
CONTROL_ROWS, CONTROL_TOKENS = 4, 4096
#: Of the publish guard: rows, tokens of a row's prefix, and positions of a row at which whole distributions of our own servers are compared;
#: other servers give the log-probability of every token of the prefix.
PROBE_ROWS, PROBE_TOKENS, PROBE_POSITIONS = 2, 2048, 16
#: Positions at the end of a long sequence that trainer and server are compared at.
LATE_POSITIONS = 64
#: Tokens of the fixed probe on which another server is followed from version to version, and the standard error of its share
#: of a move up to which the share counts as measured: a share of 0 and one of 1 are then 8 standard errors apart.
FOLLOW_TOKENS, FOLLOW_ERROR = 257, 0.125


@dataclass
class Followed:
    """Log-probabilities of the fixed probe's tokens when a server was last seen to follow; nats, one array a server."""

    ours: np.ndarray
    theirs: list[np.ndarray] = field(default_factory=list)


def startup_checks(trainer: Any) -> None:
    """Seconds each, on the real layers: see ``checks.startup_checks``."""
    found = trainer.actor_rollout_wg.opsd_checks()[0]
    for c in found:
        trainer.run_dir.evidence(
            f"startup:{c['name']}", c["value"], c["threshold"], c["passed"] or (False if c["fatal"] else None), c["note"]
        )
    checks.require(found)


def teacher_checks(trainer: Any) -> None:
    """Teachers that are other models, at start-up: a device teacher's logits are its hidden states under its weight, and its workers agree;
    a server's log-probabilities do not depend on what follows (``teachers.server``)."""
    run = trainer.run_dir
    for t in trainer.teachers:
        if t.voice.form == "support":
            run.evidence(
                "startup:teacher_server", t.facts.head_error, None, None, f"{t.name}: nats between a sequence and its prefix"
            )
            continue
        run.evidence("startup:teacher_head", t.facts.head_error, t.facts.tolerance, True, f"{t.name}, of the largest logit")
        run.require(
            "startup:teacher_workers_agree",
            t.facts.spread,
            t.facts.tolerance,
            t.facts.spread <= t.facts.tolerance,
            "the teacher's workers give different hidden states for one sequence: devices, files or library versions differ",
            t.name,
        )


def teacher_control(trainer: Any, batch: KVBatchMeta) -> None:
    """Before the first update: teachers that are other models against the student's base, through the path that trains.

    Without the brief, on some of the rows, the divergence is the gap between the models: a gate when the teacher is the student's own
    model, which has none. With the brief, on all of them, it is the pull. The rows carry the teacher's view again afterwards.
    """
    gates, run = trainer.opsd.gates, trainer.run_dir
    some = _sample(trainer, batch)
    trainer.score(some, "own")
    gap = _control(trainer, some, "device", 0, "off")
    detail = f"mean nats over {gap.size} loss positions, max {gap.max():.2e}"
    if [_place(t.path) for t in trainer.teachers] == [_place(trainer.config.actor_rollout_ref.model.path)]:
        limit = gates.device_identity_max if trainer.teachers[0].voice.form == "exact" else gates.publish_kl_max
        run.require(
            "device_identity",
            float(gap.mean()),
            limit,
            bool(gap.mean() <= limit),
            "a teacher that is the student's model differs from the student's base: dtype, kernels, positions or head",
            detail,
        )
    run.evidence("teacher_gap", float(gap.mean()), None, None, f"no brief; {detail}")
    trainer.score(some, "view")
    pull = _control(trainer, batch, "device", 0, "off")
    run.evidence("teacher_pull", float(pull.mean()), None, None, f"teacher with brief, mean nats, max {pull.max():.2e}")


def _place(path: str) -> str:
    """One name of a model: its folder may be written in several ways."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


def _control(trainer: Any, batch: KVBatchMeta, teacher: str, shift: int, adapters: str) -> np.ndarray:
    """Sizes of the divergences: an estimate from one sampled token may have either sign, and its mean be 0 by chance."""
    return np.abs(torch.cat(divergences(trainer, batch, teacher, shift, adapters)).numpy())


def divergences(trainer: Any, batch: KVBatchMeta, teacher: str, shift: int, adapters: str) -> list[torch.Tensor]:
    """Divergence at each loss position of each row of ``batch``, in its order, through the training path (``checks.control``);
    float32[N], nats."""
    batch.extra_info |= {
        "opsd_control_teacher": teacher,
        "opsd_control_shift": shift,
        "opsd_control_adapters": adapters,
    }
    out = trainer.actor_rollout_wg.opsd_control(batch)
    if isinstance(out, KVBatchMeta):
        out = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["value_divergence"])
    for key in ("teacher", "shift", "adapters"):
        batch.extra_info.pop(f"opsd_control_{key}")
    return [d.float() for d in out["value_divergence"].unbind()]


def _sample(trainer: Any, batch: KVBatchMeta) -> KVBatchMeta:
    """The shortest rows with loss positions, of ``CONTROL_TOKENS`` and ``CONTROL_ROWS`` a rank at most: a control costs two forwards a row.
    Rows without any, of pairs that never replied and of padding, only fill up the ranks."""
    ranks = max(trainer.actor_rollout_wg._query_dispatch_info("actor")) + 1
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["opsd_position"])
    held = [
        len(p) > 0 and not t.get("is_padding", False) for p, t in zip(data["opsd_position"].unbind(), batch.tags, strict=True)
    ]
    carrying = sorted((t["seq_len"], k) for t, k, h in zip(batch.tags, batch.keys, held, strict=True) if h)
    others = [k for k, h in zip(batch.keys, held, strict=True) if not h]
    tokens = np.cumsum([n for n, _ in carrying])
    rows = max(1, int((tokens <= CONTROL_TOKENS * ranks).sum()) // ranks)
    count = min(rows, CONTROL_ROWS, len(batch) // ranks) * ranks
    return batch.select_keys(([k for _, k in carrying] + others)[:count])


def identity_control(trainer: Any, batch: KVBatchMeta) -> None:
    """Before the first update, on some of its own rows: a teacher that is the student and sees what the student saw has KL 0; with its
    positions moved by one the same measurement must fail. The brief must have an effect above the floor."""
    gates, run = trainer.opsd.gates, trainer.run_dir
    batch = _sample(trainer, batch)
    identity = _control(trainer, batch, "own", 0, "off")
    run.require(
        "identity",
        float(identity.mean()),
        gates.identity_max,
        bool(identity.mean() <= gates.identity_max),
        "the loss is not zero for an identical teacher: positions, weights or layout of the two passes differ",
        f"mean nats over {identity.size} loss positions, max {identity.max():.2e}",
    )
    shifted = _control(trainer, batch, "own", 1, "off")
    run.require(
        "identity_shifted",
        float(shifted.mean()),
        gates.shifted_min,
        bool(shifted.mean() > gates.shifted_min),
        "the identity control can't fail, so its zero says nothing: look at whether the signal depends on the position",
        "negative control: teacher positions moved by one token",
    )
    brief = _control(trainer, batch, "view", 0, "off")
    effect, placement = float(brief.mean()), trainer.opsd.brief.placement
    detail = f"mean nats, teacher with brief against without, placement {placement}, max {brief.max():.2e}"
    if trainer.opsd.brief.name == "none":  # the identity arm
        run.evidence("brief_effect", effect, None, None, detail)
    else:
        run.require(
            "brief_effect",
            effect,
            gates.brief_effect_min,
            effect > gates.brief_effect_min,
            "the brief changes nothing at the student's tokens, so there is nothing to learn from it: look at it with `opsd probe`",
            detail,
        )


def identity_end(trainer: Any, batch: KVBatchMeta) -> None:
    """After an update of the identity arm: a student that was trained towards its own base, without a brief, is still its base."""
    gates, run = trainer.opsd.gates, trainer.run_dir
    moved = _control(trainer, _sample(trainer, batch), "own", 0, "on")
    run.require(
        "identity_ends_at_base",
        float(moved.mean()),
        gates.identity_end_max,
        bool(moved.mean() <= gates.identity_end_max),
        "a teacher that says what the student says has moved it: the loss has a gradient where it is 0, or the optimizer drifts by itself",
        f"mean nats between trained student and base over {moved.size} loss positions, max {moved.max():.2e}",
    )


def states(trainer: Any, batch: KVBatchMeta) -> None:
    """The update's states in their order, as one hash: arms of a comparison have the same."""
    fields = ("input_ids", "opsd_position")
    digest = hashlib.sha256()
    real = [k for k, t in zip(batch.keys, batch.tags, strict=True) if not t.get("is_padding", False)]
    data = tq.kv_batch_get(keys=real, partition_id=batch.partition_id, select_fields=list(fields))
    count = 0
    for ids, position in zip(*(data[f].unbind() for f in fields), strict=True):
        count += len(position)
        for part in (ids, position):
            digest.update(f"|{len(part)}|".encode() + part.to(torch.int64).cpu().numpy().tobytes())
    trainer.run_dir.evidence("states", count, None, None, f"loss positions of {len(real)} rows, sha256 {digest.hexdigest()}")


def after_publish(trainer: Any, batch: KVBatchMeta | None) -> float:
    """Compares trained and published weights before any rollout uses them.

    Every tensor bound; after an update the adapter is not zero, or without one some weight has changed; KL(trained || published), mean over probe positions, within
    ``gates.publish_kl_max``. Other servers than ours give the log-probabilities of given tokens only: the second-order estimate of
    the same divergence is bounded, and the share of the trained weights' move that the server made must be at least
    ``gates.publish_follow_min`` (:func:`_require_followed`).

    Returns:
        The divergence in nats.
    """
    gates, run = trainer.opsd.gates, trainer.run_dir
    stats = trainer.actor_rollout_wg.opsd_adapter_stats()[0]
    trained = batch is not None
    if stats["tensors"] and trained:
        run.require(
            "adapter_non_zero",
            stats["max_abs_B"],
            0.0,
            stats["max_abs_B"] > 0 or abs(trainer.last_loss) <= gates.identity_max,  # an identical teacher teaches nothing
            "the update left the adapter at zero: learning rate, coefficients or gradient flow",
            f"{stats['tensors']} tensors of {stats['dtypes']}, loss {trainer.last_loss:.2e}",
        )
    own = trainer.config.actor_rollout_ref.rollout.name in OWN_BACKENDS
    late = None if trained else _late_gap(trainer, own)  # before the others: they are of what is served in the end
    sequences, positions = _probes(trainer, batch, PROBE_POSITIONS if own else PROBE_TOKENS)
    group = trainer.actor_rollout_wg
    ours = (group.opsd_logprobs if own else group.opsd_token_logprobs)(sequences, positions)[0]
    servers = servers_of(trainer)
    worst = 0.0
    for n, server in enumerate(servers):
        if own:
            report = ray.get(server.adapter_report.remote(), timeout=120)
            _require_bound(run, report, stats, n, trained)
            kl = _whole_gap(server, sequences, positions, ours)
        else:
            theirs = [_given_logprobs(server, ids)[places] for ids, places in zip(sequences, positions, strict=True)]
            kl = sampled_gap(np.concatenate(ours), np.concatenate(theirs))
        require_served(trainer, kl, n, f"{sum(map(len, positions))} positions")
        worst = max(worst, kl)
    if late is not None:
        _require_late(trainer, *late)
    if not own:
        _require_followed(trainer, servers, trainer_rounds=stats["compute"] != "float32")
    return worst


def _late_gap(trainer: Any, own: bool) -> tuple[float, int]:
    """Divergence in nats of trainer and server 0, an implementation of its own, at the end of a sequence of ``gates.publish_late_tokens``, at most
    of the whole context, and the length: what differs by an amount that grows with the distance between tokens (rotary frequencies)
    is nothing at early positions.

    Our own servers are compared as after a publish, on fixed tokens. Another server continues them, since it would hold the distributions of a
    whole prompt in its device's memory if it was asked for given tokens; and it sleeps while the trainer runs, as in every update.
    """
    length = min(trainer.opsd.gates.publish_late_tokens, trainer.opsd.contract.context_length)
    server, positions = servers_of(trainer)[0], list(range(length - LATE_POSITIONS - 1, length - 1))
    ids = _repeated(trainer.tokenizer, length)
    if own:
        return _whole_gap(server, [ids], [positions], trainer.actor_rollout_wg.opsd_logprobs([ids], [positions])[0]), length
    reply, theirs = _continued(server, ids[:-LATE_POSITIONS])
    trainer.checkpoint_manager.sleep_replicas()
    (ours,) = trainer.actor_rollout_wg.opsd_token_logprobs([ids[:-LATE_POSITIONS] + reply], [positions])[0]
    trainer.checkpoint_manager.update_weights(trainer.global_steps)
    return sampled_gap(ours, theirs), length


def _require_late(trainer: Any, kl: float, length: int) -> None:
    limit = trainer.opsd.gates.publish_late_max
    trainer.run_dir.require(
        "publish_late",
        kl,
        limit,
        kl <= limit,
        "trainer and rollout server agree on early positions alone: rotary frequencies, their scaling or dtype, position ids",
        f"server 0, version {trainer.global_steps}, the last {LATE_POSITIONS} positions of {length}",
    )


def _repeated(tokenizer: Any, length: int) -> list[int]:
    """Random tokens of text, the second half those of the first: what a model says in the second depends on the first, half the length away."""
    text = sorted(set(range(len(tokenizer))) - set(tokenizer.added_tokens_decoder))
    half = np.random.default_rng(0).choice(text, -(-length // 2)).tolist()
    return (half + half)[:length]


def servers_of(trainer: Any) -> list[Any]:
    """Handles of the rollout servers."""
    return [r._server_handle for r in trainer.llm_server_manager.get_replicas()]


def require_served(trainer: Any, kl: float, n: int, detail: str) -> None:
    """The gate on the divergence between the trained weights and server ``n``."""
    limit = trainer.opsd.gates.publish_kl_max
    trainer.run_dir.require(
        "publish_kl",
        kl,
        limit,
        kl <= limit,
        "the rollout server does not serve the weights that were trained",
        f"server {n}, version {trainer.global_steps}, {detail}",
    )


def _require_bound(run: RunDir, report: dict[str, Any], stats: dict[str, Any], n: int, trained: bool) -> None:
    """Every tensor of the adapter, or of the whole model without one, has its place in server ``n``."""
    kind, tensors = ("adapter", stats["tensors"]) if stats["tensors"] else ("full", stats["parameters"])
    whole = report["kind"] == kind and not report["missing"] and not report["unexpected"]
    # tied weights are one parameter and may arrive under each of their names
    enough = report["bound"] == tensors if kind == "adapter" else report["bound"] >= tensors
    run.require(
        f"{kind}_bound",
        report["bound"],
        tensors,
        whole and enough,
        "the rollout server did not bind every published tensor",
        f"server {n}: {report}",
    )
    if trained and kind == "full":
        run.require(
            "weights_changed",
            report["changed"],
            0,
            report["changed"] > 0,
            "the update left every weight as it was: learning rate, coefficients or gradient flow",
            f"server {n}, {report['bound']} tensors",
        )


def kl_rows(p_PV: np.ndarray, q_PV: np.ndarray) -> np.ndarray:
    """KL(p || q) in nats for each row of log-probabilities, in float64 and with every term non-negative."""
    p, d = p_PV.astype(np.float64), p_PV.astype(np.float64) - q_PV.astype(np.float64)
    return (np.exp(p) * (np.expm1(-d) + d)).sum(-1)


def _given_logprobs(server: Any, ids: list[int]) -> np.ndarray:
    """float64[len(ids) - 1]: log-probability of each token but the first, from a server of verl's (vLLM, SGLang)."""
    params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0}
    call = server.generate.remote(prompt_ids=ids, sampling_params=params, request_id=f"guard-{uuid.uuid4().hex}")
    fields = ray.get(call, timeout=600).extra_fields
    scored = [row[0] for row in fields["prompt_ids"][:-1]]
    if scored != ids[1:]:
        raise OpsdError(
            f"the rollout server scored other tokens than it was given ({len(scored)} for {len(ids)})",
            "prompt_logprobs=0 gives the log-probability of each prompt token",
            "use a server that supports prompt_logprobs",
        )
    return np.asarray([row[0] for row in fields["prompt_logprobs"][:-1]], np.float64)


def _continued(server: Any, ids: list[int]) -> tuple[list[int], np.ndarray]:
    """``LATE_POSITIONS`` tokens that a server of verl's draws after ``ids``, and their log-probabilities."""
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": LATE_POSITIONS, "logprobs": True, "ignore_eos": True}
    call = server.generate.remote(prompt_ids=ids, sampling_params=params, request_id=f"guard-{uuid.uuid4().hex}")
    out = ray.get(call, timeout=600)
    if not len(out.token_ids) == len(out.log_probs or ()) == LATE_POSITIONS:
        raise OpsdError(
            f"the rollout server drew {len(out.token_ids)} tokens with {len(out.log_probs or ())} log-probabilities after {len(ids)}",
            f"it was asked for {LATE_POSITIONS} whatever they are (ignore_eos), within rollout.max_model_len",
            "use a server that supports ignore_eos, or look at its log for why it ended the request",
        )
    return list(out.token_ids), np.asarray(out.log_probs, np.float64)


def _whole_gap(server: Any, sequences: list[list[int]], positions: list[list[int]], ours: list[np.ndarray]) -> float:
    """Mean KL in nats between whole distributions, of a server of our own."""
    theirs = ray.get(server.score_logprobs.remote(sequences, positions), timeout=600)
    return float(np.mean(np.concatenate([kl_rows(a, b) for a, b in zip(ours, theirs, strict=True)])))


def sampled_gap(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Mean squared difference over 2 of the tokens' log-probabilities: KL to second order, for servers that give no more."""
    return float(np.mean(np.square(ours - theirs)) / 2)


def share_of_move(ours: np.ndarray, theirs: np.ndarray, rounding: float = 0.0) -> tuple[float, float]:
    """Which share of the trained weights' move a server made: least squares of ``theirs = share * move + its rounding``.

    Args:
        ours, theirs: float64[P], change of the same tokens' log-probabilities since an earlier version, in nats.
        rounding: variance of the trainer's own rounding within ``ours``, nats squared: what it adds to ``ours`` pulls the slope
            towards 0 (regression dilution), so the slope is divided by the part of the variance that is not rounding.

    Returns:
        The share (1: the server serves what was trained; 0: it still serves the earlier version) and its standard error;
        infinite where the trained weights did not move, or not more than they round.
    """
    square = float(ours @ ours)
    signal = square - rounding * ours.size
    if signal <= 0:
        return 0.0, float("inf")
    slope = float(ours @ theirs) / square
    rest = theirs - slope * ours
    error = float(np.sqrt(rest @ rest / max(1, rest.size - 1) / square))
    return slope * square / signal, error * square / signal


def _fixed_tokens(trainer: Any, count: int) -> list[int]:
    size = len(trainer.tokenizer)
    return [(7919 * i + 13) % size for i in range(count)]


def fixed_probe(trainer: Any, servers: list[Any]) -> Followed:
    """Log-probabilities of ``FOLLOW_TOKENS`` fixed tokens now."""
    ids = _fixed_tokens(trainer, FOLLOW_TOKENS)
    (ours,) = trainer.actor_rollout_wg.opsd_token_logprobs([ids], [list(range(FOLLOW_TOKENS - 1))])[0]
    return Followed(ours, [_given_logprobs(s, ids) for s in servers])


def _require_followed(trainer: Any, servers: list[Any], trainer_rounds: bool) -> None:
    """A bound on the gap can't see a stale adapter where rounding (bf16) is as large as what one update moves, so the *move* of a
    fixed probe is compared. While it is too small to tell, the earlier version stays the reference and moves add up.

    Args:
        trainer_rounds: the trainer computes in less than float32. Its rounding is then as large as the server's, so half of the
            squared gap between the two at one version, and a move holds that of two versions.
    """
    now = fixed_probe(trainer, servers)
    before: Followed | None = trainer.followed
    told = True
    if before is not None:
        least = trainer.opsd.gates.publish_follow_min
        moved = now.ours - before.ours
        for n, (new, old) in enumerate(zip(now.theirs, before.theirs, strict=True)):
            rounding = float(np.mean(np.square(old - before.ours))) if trainer_rounds else 0.0
            share, error = share_of_move(moved, new - old, rounding)
            if trainer_rounds and not (new - old).any() and np.count_nonzero(moved) > moved.size / 2:
                share, error = 0.0, 0.0  # rounding alone would have changed some of them
            detail = f"server {n}, version {trainer.global_steps}, standard error {error:.3f}"
            if error > FOLLOW_ERROR:
                told = False
                again = f"{detail}: too small a move to tell, measured again with the next version's"
                trainer.run_dir.evidence("publish_follow", share, least, None, again)
                continue
            stale = "the rollout server did not take over the trained adapter"
            trainer.run_dir.require("publish_follow", share, least, share >= least, stale, detail)
    if told:
        trainer.followed = now


def _probes(trainer: Any, batch: KVBatchMeta | None, most: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token sequences and predicting positions: of this round's rows, at most ``most`` a row, or a fixed pseudo-random one at start-up."""
    if batch is None:
        return [_fixed_tokens(trainer, 64)], [list(range(63))]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids", "opsd_position"])
    sequences: list[list[int]] = []
    positions: list[list[int]] = []
    for ids, position in zip(data["input_ids"].unbind(), data["opsd_position"].unbind(), strict=True):
        usable = position[position < PROBE_TOKENS - 1][:most].tolist()
        if usable and len(sequences) < PROBE_ROWS:
            sequences.append(ids[: usable[-1] + 2].tolist())
            positions.append(usable)
    return (sequences, positions) if sequences else _probes(trainer, None, most)
