"""The trainer mode `opsd`: verl's synchronous trainer, with on-policy distillation in place of the PPO update.

One round (a trainer step) collects pairs, lets the teacher re-score the student's own tokens, trains, publishes the adapter
and, when it is due, evaluates. Passes that distillation does not need (old log-probs, reference, advantages) are skipped.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.ray_trainer import ResourcePoolManager
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_opsd import resume
from verl_opsd.config import OpsdConfig
from verl_opsd.distill.policy import PpoClip
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation import canary
from verl_opsd.evaluation.page.episodes import Options
from verl_opsd.evaluation.plan import Progress
from verl_opsd.evaluation.write import write_report
from verl_opsd.metering import Sample, Stages
from verl_opsd.rundir import RunDir
from verl_opsd.teachers.base import common
from verl_opsd.teachers.cache import tokenizer_hash
from verl_opsd.tokens.rows import FIELDS, padding_fields
from verl_opsd.tokens.store import EpisodeStore
from verl_opsd.verl_adapter import corpus, full_eval, guards, rehearsal, round_telemetry
from verl_opsd.verl_adapter.found import check_tasks_unchanged
from verl_opsd.verl_adapter.launch import canary_limits
from verl_opsd.verl_adapter.loss import ON_STUDENT, OpsdLoss
from verl_opsd.verl_adapter.memory_checks import activation_plan, shapes_of
from verl_opsd.verl_adapter.objective import is_identity, loss_of
from verl_opsd.verl_adapter.passes import by_row, jagged, own_passes, rows_of, view_passes
from verl_opsd.verl_adapter.reduce import micro_batch_rows, update_groups, with_coefficients, with_rewards
from verl_opsd.verl_adapter.requirements import vocabulary_rows
from verl_opsd.verl_adapter.routes import models_of
from verl_opsd.verl_adapter.teacher_queue import TeacherHandle, close_teachers, pools_of, score_rows, start_teachers
from verl_opsd.verl_adapter.updates import mask_at_collection, rewards_of, rows_in_queue
from verl_opsd.verl_adapter.watch import ActorWatch, queue_actors
from verl_opsd.verl_adapter.worker import OpsdWorker


def faults_of_round(step: int, outcomes: dict[str, int], run: RunDir) -> OpsdError:
    """The error of a round that infrastructure faults have ended.

    Args:
        outcomes: number of this round's episodes by outcome.
    """
    counted = ", ".join(f"{n} {kind}" for kind, n in sorted(outcomes.items()))
    return OpsdError(
        f"round {step} was ended by infrastructure faults; its episodes: {counted}",
        "a faulty episode is masked, never scored; a round needs one that was scored, and a living rollout server",
        f"read the cause above and the episodes in {run.episodes}; start again with the same hydra.run.dir to go on from the "
        "last checkpoint",
    )


@register_trainer("opsd")
class OpsdTrainer(PPOTrainerSync):
    """See the module's docstring.

    A subclass that is registered with verl's ``register_trainer`` is chosen by ``trainer.v1.trainer_mode``.

    Attributes:
        worker_cls: the Ray worker of every role, :class:`OpsdWorker` or a subclass.
    """

    worker_cls: type[OpsdWorker] = OpsdWorker

    resource_pool_manager: ResourcePoolManager
    agent_loops: ActorWatch
    ranks: ActorWatch
    queue: ActorWatch

    def __init__(self, config: Any):
        self.opsd = OpsdConfig.parse(OmegaConf.to_container(config.opsd, resolve=True))  # type: ignore[arg-type]
        self.run_dir = RunDir.from_env()
        self.devices = Stages()
        self._groups = 1
        self._stage_started = 0.0
        self._controlled = False
        self.teachers: list[TeacherHandle] = []
        self.followed: guards.Followed | None = None
        self.last_loss = 0.0
        self._kept_share = 1.0
        self._collecting = False
        self._evaluation_due = False
        self.progress: Progress | None = None
        super().__init__(config)

    # ---- set-up -------------------------------------------------------------------------------------------------------

    def _build_replay_buffer(self):  # type: ignore[no-untyped-def]
        # any name but "sync" silently gets the asynchronous buffer, batch size 1 and queue checkpoints
        self.trainer_mode = "sync"
        buffer = super()._build_replay_buffer()
        wait = buffer._wait_for_next_poll

        def watched(*args: Any) -> float:
            if self.progress is not None:
                self.progress.look()
            now = wait(*args)
            self.agent_loops.require_alive()
            self.ranks.require_alive(" while episodes were played")
            return now

        buffer._wait_for_next_poll = watched
        return buffer

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(self.worker_cls)
        if pools := pools_of(self.opsd):
            spec = self.resource_pool_manager.resource_pool_spec | pools
            self.resource_pool_manager = ResourcePoolManager(resource_pool_spec=spec, mapping=self.mapping)

    def make_loss(self) -> OpsdLoss:
        """The loss that every worker trains with."""
        actor = self.config.actor_rollout_ref.actor
        clip = PpoClip(actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c)
        return loss_of(self.opsd, self.ref_in_actor, clip)

    def on_init_end(self) -> None:
        """Starts the teachers that are other models, sets the loss, runs the start-up checks, publishes and checks what was published."""
        self.ranks = ActorWatch(
            self.actor_rollout_wg.workers,
            "student rank",
            "the weights are spread over all ranks, and the others would wait for it; nothing of this round is trained on",
        )
        with self.ranks.naming(lambda: " while the run started"):
            self._start_up()

    def _start_up(self) -> None:
        self._resume()
        if models_of(self.opsd):
            pools = self.resource_pool_manager.resource_pool_dict
            vocabulary = vocabulary_rows(self.config.actor_rollout_ref.model.path)
            self.teachers = start_teachers(self.opsd, pools, vocabulary, tokenizer_hash(self.tokenizer))
            guards.teacher_checks(self)
            for t in self.teachers:
                self.actor_rollout_wg.opsd_add_teacher(t.voice, t.head_weight())
        self._set_activations()
        self.actor_rollout_wg.set_loss_fn(self.make_loss())
        guards.startup_checks(self)
        super().on_init_end()
        guards.after_publish(self, batch=None)
        rehearsal.rehearse(self)
        self._samples()  # from here on every device is sampled

    def _set_activations(self) -> None:
        """Tells every rank which layers keep their activations; one plan, of the smallest device."""
        if self.opsd.activations.keep == "verl" or self.opsd.mode == "evaluate":
            return
        facts = self.actor_rollout_wg.opsd_facts()
        sizes = [size for size, _ in facts if size is not None]
        student, teachers = shapes_of(self.config, self.opsd, facts[0][1])
        chosen = activation_plan(self.config, self.opsd, student, teachers, min(sizes, default=None))
        self.actor_rollout_wg.opsd_set_activations(chosen)
        print(f"activations: {chosen}", flush=True)

    def _resume(self) -> None:
        """Moves aside what rounds after the checkpoint left. An evaluation that was due and did not end is run again."""
        if self.opsd.mode == "evaluate":  # what is on record stays
            return
        step, trainer = self.global_steps, self.config.trainer
        due = step > 0 and trainer.test_freq > 0 and (step >= self.total_training_steps or step % trainer.test_freq == 0)
        ended = resume.evaluated(self.run_dir, step)
        self._evaluation_due = due and not ended and not trainer.val_before_train
        resume.set_aside(self.run_dir, step, keep_evaluation=ended and not trainer.val_before_train)

    def on_train_begin(self) -> None:
        super().on_train_begin()
        if self._evaluation_due:  # of the round before the next one
            self.global_steps -= 1
            self.logger.log(data=self._validate(), step=self.global_steps)
            self.global_steps += 1

    def fit(self, agent_loop_manager: Any) -> None:
        """Trains, exports the adapter and writes the report; the report also when only evaluation was asked for."""
        self.agent_loops = ActorWatch(
            agent_loop_manager.agent_loop_workers,
            "agent-loop worker",
            "its unfinished episodes are lost with it, and verl would wait for them for ever",
        )
        self.queue = ActorWatch(
            queue_actors(),
            "process of TransferQueue",
            "it holds the rows of this round, which are lost with it; episodes that ended are in the run's own store",
        )
        with self.run_dir.stage(0, "start", started=self.run_dir.started()):
            pass  # it ends here: workers run, models are loaded, start-up checks have passed
        try:
            with (
                self.ranks.naming(lambda: f" in round {self.global_steps}"),
                self.queue.interrupting(lambda: f" in round {self.global_steps}"),
            ):
                super().fit(agent_loop_manager)
        finally:
            close_teachers(self.teachers)
        if self.config.trainer.save_freq <= 0 and not self.config.trainer.val_only:
            self._export_adapter(self.total_training_steps)
        check_tasks_unchanged(self.run_dir)
        write_report(self.run_dir, self.opsd, Options(tokenizer=self.tokenizer))

    def _load_checkpoint(self) -> None:
        self.actor_rollout_wg.opsd_keep(self.make_loss())  # copies of the weights are what the model was before any training
        super()._load_checkpoint()

    def _save_checkpoint(self) -> None:
        self._export_adapter(self.global_steps)  # before verl's part, which marks the checkpoint as whole
        super()._save_checkpoint()

    def _export_adapter(self, step: int) -> None:
        """The trained adapter in PEFT's layout; nothing in full-parameter training, whose weights are in verl's checkpoint."""
        if self.ref_in_actor:
            self.actor_rollout_wg.opsd_export_adapter(
                str(Path(self.config.trainer.default_local_dir, f"global_step_{step}", "adapter").absolute())
            )

    # ---- collect ------------------------------------------------------------------------------------------------------

    def on_step_begin(self) -> None:
        self._stage_started = time.time()

    def prepare_step(self) -> dict[str, Any]:
        if self.opsd.mode == "offline":
            corpus.enqueue(self)
            return {}
        return super().prepare_step()

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        size = corpus.size(self.opsd) if self.opsd.mode == "offline" else sample_batch_size
        with self._naming_faults("train"):
            return super()._step_once(metrics, timing_raw, size)

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        self._collecting = self.opsd.mode != "offline"

    def on_sample_end(self) -> None:
        super().on_sample_end()
        if self._collecting:
            self._require_recorded("train", self.config.data.train_batch_size)
            every = self.opsd.canary.every
            if every is not None and self.global_steps % every == 0:
                limits = canary.read_limits(canary_limits(self.opsd))
                canary.check(self.run_dir, self.global_steps - every + 1, self.global_steps, limits)
        self._collecting = False
        self._finish_stage("collect")

    @contextmanager
    def _naming_faults(self, split: str) -> Iterator[None]:
        """Errors of collecting episodes, after infrastructure faults, as one error that counts them."""
        try:
            yield
        except OpsdError:
            raise
        except Exception as error:
            outcomes = self._outcomes(split) if self._collecting else {}
            if set(outcomes) <= {"scored"}:
                raise
            raise faults_of_round(self.global_steps, outcomes, self.run_dir) from error

    def _outcomes(self, split: str) -> dict[str, int]:
        """How this round's stored episodes of a split ended."""
        store = EpisodeStore(self.run_dir.episodes)
        prefix = f"{split}-{self.global_steps:05d}-"
        return dict(Counter(store.read(e).outcome for e in store.ids() if e.startswith(prefix)))

    def _require_recorded(self, split: str, count: int) -> None:
        """verl goes on without an episode whose code raised; here every episode is on record, or the run stops.

        Raises:
            OpsdError: an episode left no record.
        """
        outcomes = self._outcomes(split)
        if sum(outcomes.values()) != count:
            raise OpsdError(
                f"round {self.global_steps}: {sum(outcomes.values())} of {count} {split} episodes are on record ({outcomes})",
                "an episode ends scored or as a named fault; one that ends in another error is a bug or bad input",
                "read the error of the agent-loop worker in this output (`Error in _run_prompt`)",
            )

    def _finish_stage(self, name: str, ended: float | None = None, **outputs: Any) -> None:
        """The next stage starts where this one ended: now, when left out."""
        started, self._stage_started = self._stage_started, time.time() if ended is None else ended
        self.devices.add(self._samples())
        outputs["devices"] = self.devices.end(self._stage_started)
        with self.run_dir.stage(self.global_steps, name, started=started, ended=self._stage_started) as out:
            out.update(outputs)

    def _samples(self) -> dict[str, list[Sample]]:
        """How busy and full each device was since the last call."""
        found = {f"student {rank}": s for rank, s in enumerate(self.actor_rollout_wg.opsd_samples())}
        for t in self.teachers:
            name = "teacher" if len(self.teachers) == 1 else f"teacher {t.name}"
            found |= {f"{name} {worker}": s for worker, s in enumerate(t.samples())}
        return found

    # ---- rows ---------------------------------------------------------------------------------------------------------

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch=False):
        """Groups rows by optimizer step (counted in episodes, not rows), pads every group to the same number of rows a
        rank, whole micro-batches, and balances tokens over ranks inside each group."""
        dp = max(self.actor_rollout_wg._query_dispatch_info("actor")) + 1
        self.actor_rollout_wg._dispatch_info.setdefault("actor", self.actor_rollout_wg._query_dispatch_info("actor"))
        carries = [bool((r["opsd_coef"] != 0).any()) for r in rows_in_queue(batch, ["opsd_coef"])]
        if not any(carries):
            raise OpsdError(
                f"no position that carries loss in this round's {len(batch)} rows",
                "an update needs loss positions",
                "look at the episodes: every agent failed before its first reply (context limit), or opsd.loss.class_weights, "
                "turn_kinds, turns, segments and max_prefix leave nothing",
            )
        groups = update_groups(batch.keys, carries, self.opsd.loss.episodes_per_update)
        unit = dp * micro_batch_rows(self.config.actor_rollout_ref)
        rows = -(-max(map(len, groups)) // unit) * unit
        real = len(batch)
        batch = upsample_batch_to_divisible_size(batch, rows * len(groups), self.tokenizer.eos_token_id)
        spare = iter(range(real, len(batch)))
        groups = [g + [next(spare) for _ in range(rows - len(g))] for g in groups]
        order: list[list[int]] = [[] for _ in range(dp)]
        for group in groups:
            work = calculate_workload(torch.tensor([batch.tags[i]["seq_len"] for i in group], dtype=torch.int64))
            for rank, part in enumerate(get_seqlen_balanced_partitions(work, k_partitions=dp, equal_size=True)):
                order[rank].extend(group[j] for j in part)
        flat_order = sum(order, [])
        member = {i: g for g, group in enumerate(groups) for i in group}
        self._group_of = [member[i] for i in flat_order]
        self._groups = len(groups)
        batch.reorder(flat_order)
        metrics["opsd/rows"], metrics["opsd/padding_rows"] = real, len(batch) - real
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Final coefficients over the global batch; padding rows get no loss position."""
        stored = rows_in_queue(batch, [*FIELDS, "opsd_name", "input_ids", "response_mask"])
        rows = [
            padding_fields(r["input_ids"]) if tag.get("is_padding", False) else {k: r[k] for k in FIELDS}
            for tag, r in zip(batch.tags, stored, strict=True)
        ]
        rows = with_coefficients(rows, batch.keys, self._group_of, self.opsd.loss)
        if self.opsd.loss.task_reward_coef > 0:
            rows = with_rewards(rows, batch.keys, self._group_of, rewards_of(batch), self.opsd.loss.task_reward_coef)
        fields = {k: jagged([r[k] for r in rows]) for k in FIELDS}
        names = [bytes(r["opsd_name"].tolist()).decode() for r in stored]
        self._row_names = sorted(set(names))  # the same however rows are spread over ranks
        place = {name: i for i, name in enumerate(self._row_names)}
        fields["opsd_row"] = jagged([torch.tensor([place[name]]) for name in names])
        zeros = jagged([torch.zeros(r["response_mask"].numel()) for r in stored])
        fields["advantages"], fields["returns"] = zeros, zeros.clone()
        if self.teachers and self.opsd.mode == "online":
            self._clear_padding_signals(batch)
        tokens = sum(r["opsd_view_ids"].numel() + s["input_ids"].numel() for r, s in zip(rows, stored, strict=True))
        loss_tokens = sum(int((r["opsd_coef"] != 0).sum()) for r in rows)
        metrics["opsd/loss_tokens"] = loss_tokens
        metrics["opsd/tokens_per_loss_token"] = tokens / loss_tokens
        self._sequence_tokens, self._loss_tokens = tokens, loss_tokens
        self._student_tokens = sum(s["input_ids"].numel() for s in stored)
        return tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch))
        )

    # ---- score and train ----------------------------------------------------------------------------------------------

    def _clear_padding_signals(self, batch: KVBatchMeta) -> None:
        """Padding rows are copies of rows that were scored when their episodes ended; theirs hold no position."""
        keys = [k for k, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding", False)]
        if keys:
            width, dtype = common([t.voice for t in self.teachers])
            fields = TensorDict({"opsd_signal": jagged([torch.empty(0, width, dtype=dtype)] * len(keys))}, batch_size=len(keys))
            tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields)

    def score(self, batch: KVBatchMeta, source: Literal["view", "own"]) -> KVBatchMeta:
        """Puts the signals of each row's teacher at its loss positions into the rows, as ``opsd_signal`` [N_r, width].

        Args:
            source: ``view``: the teacher's view, through the cache; ``own``: the student's own ids, always scored.
        """
        names = ["input_ids", "opsd_teacher", *FIELDS]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        rows, whose = rows_of(data), [int(n[0]) for n in data["opsd_teacher"].unbind()]
        passes = by_row(view_passes(rows) if source == "view" else own_passes(rows), len(rows))
        signals = asyncio.run(score_rows(self.teachers, passes, whose, cached=source == "view"))
        fields = TensorDict({"opsd_signal": jagged(signals)}, batch_size=len(batch))
        scored: KVBatchMeta = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        scored.extra_info = batch.extra_info
        return scored

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self._stage_started = time.time()
        if self.teachers:
            if self.opsd.mode == "offline":  # online each episode was scored when it ended
                batch = self.score(batch, "view")
            reports = {t.name: t.report() for t in self.teachers}
            metrics["opsd/teacher_restarts"] = sum(r["restarts"] for r in reports.values())
            self._finish_stage("score", **(reports if len(reports) > 1 else next(iter(reports.values()))))
        actor = self.config.actor_rollout_ref.actor
        size = len(batch) // self._groups
        batch.extra_info.update(
            {
                "global_batch_size": size,
                "mini_batch_size": size,
                "epochs": self.opsd.loss.epochs,
                "seed": actor.data_loader_seed,
                "dataloader_kwargs": {"shuffle": False},
                "temperature": 1.0,
                "calculate_entropy": False,
            }
        )
        if not self._controlled:
            guards.identity_control(self, batch)
            if self.teachers:
                guards.teacher_control(self, batch)
            self._controlled = True
            self._finish_stage("control")
        if self.opsd.loss.threshold is not None and self.opsd.loss.threshold.taken == "collection":
            kind = "device" if self.teachers else "view"
            divergences = guards.divergences(self, batch, kind, 0, "on")
            self._kept_share = mask_at_collection(batch, divergences, self._group_of, self.opsd.loss)
        guards.states(self, batch)
        output = self.actor_rollout_wg.update_actor(batch)["metrics"]
        if is_identity(self.opsd):
            guards.identity_end(self, batch)
        if self.opsd.teacher.kind in ON_STUDENT:  # the workers scored the rows first
            self._finish_stage("score", ended=self._stage_started + self.actor_rollout_wg.opsd_score_seconds()[0])
        self._save_telemetry(output)
        output = rename_dict(output, "actor/")
        output["perf/mfu/actor"] = output.pop("actor/mfu", [0.0])
        metrics.update(reduce_metrics(output))
        metrics.update(self._means)
        self.last_loss = float(metrics["actor/loss"])
        self._finish_stage(
            "train",
            loss=self.last_loss,
            loss_tokens=self._loss_tokens,
            sequence_tokens=self._sequence_tokens,
            student_tokens=self._student_tokens,
            view_tokens=self._sequence_tokens - self._student_tokens,
            **self._means,
        )
        self._last_batch = batch
        return batch

    def _save_telemetry(self, output: dict[str, Any]) -> None:
        """Per-position values of every optimizer step of this round, taken out of verl's metrics."""
        path = self.run_dir.path / "telemetry" / f"{self.global_steps:05d}.npz"
        values = round_telemetry.save(path, output, self._loss_tokens, self._row_names)
        threshold = self.opsd.loss.threshold
        if threshold is not None and threshold.taken == "current":  # a clip is never 0, and a gate hardly ever
            self._kept_share = float((values["weight"][values["coef"] != 0] != 0).mean())
        self._means = {"opsd/kept_share": self._kept_share} if threshold is not None else {}
        self._means |= round_telemetry.means(values, [t.name for t in self.teachers])

    # ---- publish and evaluate -----------------------------------------------------------------------------------------

    def on_step_end(self) -> None:
        self._stage_started = time.time()
        super().on_step_end()
        kl = guards.after_publish(self, batch=self._last_batch)
        self._finish_stage("publish", kl=kl, version=self.global_steps)

    def _validate(self) -> dict[str, float]:
        self._stage_started, self._collecting = time.time(), True
        with self._naming_faults("eval"):
            if self.opsd.mode == "evaluate":
                result = full_eval.evaluate(self, super()._validate)
            else:
                result = super()._validate()
        self._collecting = False
        if self.opsd.mode != "evaluate":
            self._require_recorded("eval", len(self.val_dataset))
        self._finish_stage("evaluate")
        return result
