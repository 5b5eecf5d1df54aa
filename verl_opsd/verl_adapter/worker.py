"""Ray workers: verl's training worker with a scoring pass before its epochs, and the remote methods that the trainer calls."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_opsd.errors import OpsdError
from verl_opsd.metering import Meter, Sample, here
from verl_opsd.models.checkpointing import Plan
from verl_opsd.models.kernels import Choice
from verl_opsd.teachers.base import Voice
from verl_opsd.verl_adapter import checks, export
from verl_opsd.verl_adapter.engine import OpsdEngine
from verl_opsd.verl_adapter.loss import ON_STUDENT, OpsdLoss
from verl_opsd.verl_adapter.passes import jagged


def select_engine() -> None:
    """Makes verl's engine registry choose :class:`OpsdEngine` in this process; without an accelerator too."""
    os.environ["VERL_ENGINE_VENDOR"] = "opsd"
    if not torch.cuda.is_available():
        os.environ["VERL_ENGINE_DEVICE"] = "cuda"


class OpsdTrainingWorker(TrainingWorker):
    """verl's training worker. With an :class:`OpsdLoss`, an update's rows are scored once, before all of its epochs."""

    engine: OpsdEngine
    score_seconds: float = 0.0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def set_loss_fn(self, loss_fn: Any) -> None:
        """verl's; an :class:`OpsdLoss` is checked against the engine first.

        Raises:
            OpsdError: this engine can't train with it.
        """
        if isinstance(loss_fn, OpsdLoss):
            self._opsd_engine().prepare(loss_fn)
        super().set_loss_fn(loss_fn)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        """verl's loop over epochs and mini-batches, after scoring.

        A batch that brings ``opsd_signal`` (jagged hidden states [N_r, H] of the teacher that the loss names) is not scored; all
        ranks must bring it or none.

        Returns:
            verl's metrics, and for each loss position, in one order, flat lists ``opsd/<value>`` (``step.TOKEN_VALUES``,
            ``step.ROW_VALUES``) and ``opsd/step``, the optimizer step that used it.

        Raises:
            OpsdError: ranks disagree about who scores, or a row breaks its contract.
        """
        if isinstance(self.loss_fn, OpsdLoss):
            started = time.monotonic()
            with self.engine.eval_mode(disable_auto_offload=tu.get(data, "disable_auto_offload", False)):
                self._score(data, self.loss_fn)
                self._opsd_engine().round_begins()
            self.score_seconds = time.monotonic() - started
        return super().train_mini_batch(data)

    def _score(self, data: TensorDict, loss: OpsdLoss) -> None:
        wanted: dict[str, Literal["view", "own"]] = {} if loss.spec.divergence == "nll" else {"opsd_signal": "view"}
        if loss.anchor:
            wanted["opsd_base"] = "own"
        for name, source in wanted.items():
            given = torch.tensor(int(name in data), device=get_device_id())
            dist.all_reduce(given, op=dist.ReduceOp.SUM)
            if int(given) == 0 and name == "opsd_signal" and loss.teacher not in ON_STUDENT:
                raise OpsdError(
                    f"teacher={loss.teacher} and rows without opsd_signal",
                    f"only {', '.join(ON_STUDENT)} are scored by the student's engine",
                    "put the teacher's hidden states into the rows before the update",
                )
            if int(given) == 0:
                data[name] = jagged(self.engine.score(data, loss.of_reference if name == "opsd_base" else loss, source))
            elif int(given) != dist.get_world_size():
                raise OpsdError(
                    f"{name} is in the batch of {int(given)} of {dist.get_world_size()} ranks",
                    "whether rows are scored here is the same on all ranks, or their forwards would not match",
                    f"put {name} into all rows of the update or into none",
                )

    def _opsd_engine(self) -> OpsdEngine:
        if not isinstance(self.engine, OpsdEngine):
            raise OpsdError(
                f"distillation on engine {type(self.engine).__name__}",
                "the loss-position head lives in OpsdEngine",
                "build workers as OpsdWorker, or call select_engine() in the process that builds the engine",
            )
        return self.engine

    def _loss(self) -> OpsdLoss:
        if not isinstance(self.loss_fn, OpsdLoss):
            raise OpsdError(
                f"loss function {type(self.loss_fn).__name__}",
                "checks and controls use the reference that the distillation loss names",
                "call set_loss_fn with an OpsdLoss first",
            )
        return self.loss_fn

    def control(self, data: TensorDict) -> TensorDict:
        """See :meth:`OpsdWorker.opsd_control`."""
        teacher, shift, adapters = (tu.get(data, f"opsd_control_{k}") for k in ("teacher", "shift", "adapters"))
        if teacher not in ("own", "view", "device") or not isinstance(shift, int) or adapters not in ("off", "on"):
            raise OpsdError(
                f"control with teacher={teacher!r} shift={shift!r} adapters={adapters!r}",
                "teacher is own, view or device, shift a number of tokens, adapters off or on",
                "put opsd_control_teacher, opsd_control_shift and opsd_control_adapters into the batch's extra info",
            )
        cfg = self.engine_config
        tu.assign_non_tensor(
            data,
            use_remove_padding=self.model_config.use_remove_padding,
            use_dynamic_bsz=cfg.use_dynamic_bsz,
            max_token_len_per_gpu=cfg.infer_max_token_len_per_gpu,
            micro_batch_size_per_gpu=cfg.infer_micro_batch_size_per_gpu,
        )
        with self.engine.eval_mode():
            return checks.control(self._opsd_engine(), data, self._loss(), teacher, shift, adapters)

    def add_teacher(self, voice: Voice, weight_VH: Tensor | None) -> None:
        """See :meth:`OpsdWorker.opsd_add_teacher`."""
        self._opsd_engine().add_teacher(voice, weight_VH)

    def facts(self) -> tuple[float | None, Choice]:
        """See :meth:`OpsdWorker.opsd_facts`."""
        cuda = torch.cuda.is_available()
        total = float(torch.cuda.get_device_properties(get_device_id()).total_memory) if cuda else None
        return total, self._opsd_engine().kernels

    def set_activations(self, chosen: Plan) -> None:
        """See :meth:`OpsdWorker.opsd_set_activations`."""
        self._opsd_engine().set_activations(chosen)

    def keep(self, loss: OpsdLoss) -> None:
        """See :meth:`OpsdWorker.opsd_keep`."""
        self._opsd_engine().keep(loss)

    def run_checks(self) -> list[checks.Check]:
        """See :meth:`OpsdWorker.opsd_checks`."""
        with self.engine.eval_mode():
            return checks.startup_checks(self._opsd_engine(), self._loss())

    def logprobs(self, sequences: list[list[int]], positions: list[list[int]]) -> list[np.ndarray]:
        """See :meth:`OpsdWorker.opsd_logprobs`."""
        with self.engine.eval_mode():
            return checks.logprobs(self._opsd_engine(), sequences, positions)

    def token_logprobs(self, sequences: list[list[int]], positions: list[list[int]]) -> list[np.ndarray]:
        """See :meth:`OpsdWorker.opsd_token_logprobs`."""
        with self.engine.eval_mode():
            return checks.token_logprobs(self._opsd_engine(), sequences, positions)

    def rehearse(self, scale: float | None) -> None:
        """See :meth:`OpsdWorker.opsd_rehearse`."""
        with self.engine.eval_mode():
            self._opsd_engine().rehearse(scale)

    def export_adapter(self, folder: str) -> None:
        """See :meth:`OpsdWorker.opsd_export_adapter`."""
        with self.engine.eval_mode():
            export.export_adapter(self._opsd_engine(), Path(folder))

    def adapter_stats(self) -> dict[str, Any]:
        """See :meth:`OpsdWorker.opsd_adapter_stats`."""
        return checks.adapter_stats(self._opsd_engine())


class OpsdWorker(ActorRolloutRefWorker):
    """verl's actor worker with :class:`OpsdEngine` inside, and what the trainer asks of it."""

    actor_worker_cls = OpsdTrainingWorker
    actor: OpsdTrainingWorker  # type: ignore[assignment]
    _meter: Meter | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        select_engine()
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def opsd_control(self, data: TensorDict) -> TensorDict:
        """Identity, negative and conditioning control on real rows, through the training path, without a gradient.

        Args:
            data: rows (``tokens.rows``), and in its extra info ``opsd_control_teacher``: ``own`` scores the student's own ids
                (identity), ``view`` the teacher's view, both under the reference weights; ``device`` takes the rows' own
                ``opsd_signal`` from the device teacher; ``opsd_control_shift``: tokens by which the teacher's positions are
                moved, 0 or a negative control; ``opsd_control_adapters``: ``off`` or ``on``, the student's side.

        Returns:
            float32 jagged fields ``value_divergence`` (nats), ``value_agree``, ... (``step.TOKEN_VALUES``), one entry for each
            loss position of each row, rows in the order of ``data``; without rows on ranks that are not asked for theirs, where verl's bridge
            to its queue would fail on any.
        """
        out = self.actor.control(data)
        return out if self.query_collect_info("actor") else TensorDict({}, batch_size=())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def opsd_add_teacher(self, voice: Voice, weight_VH: Tensor | None) -> None:
        """Makes a teacher known that scores elsewhere (``OpsdEngine.add_teacher``); before the loss is set."""
        self.actor.add_teacher(voice, weight_VH)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def opsd_keep(self, loss: OpsdLoss) -> None:
        """Keeps what the loss needs of the weights as they are now (``OpsdEngine.keep``); before a checkpoint is loaded."""
        self.actor.keep(loss)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def opsd_facts(self) -> tuple[float | None, Choice]:
        """Bytes of this rank's device, None without an accelerator, and the kernels that its layers run on."""
        return self.actor.facts()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def opsd_set_activations(self, chosen: Plan) -> None:
        """Which layers keep their activations (``OpsdEngine.set_activations``)."""
        self.actor.set_activations(chosen)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def opsd_checks(self) -> list[checks.Check]:
        """Start-up checks (``checks.startup_checks``), the same on every rank; needs ``set_loss_fn`` before. Stop a run with
        ``checks.require``."""
        return self.actor.run_checks()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def opsd_logprobs(self, sequences: list[list[int]], positions: list[list[int]]) -> list[np.ndarray]:
        """Log-probabilities float32[P, V] (nats) of the trained weights for the publish guard; empty but on rank 0."""
        out = self.actor.logprobs(sequences, positions)
        return out if self.rank == 0 else []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def opsd_token_logprobs(self, sequences: list[list[int]], positions: list[list[int]]) -> list[np.ndarray]:
        """Log-probability float64[P] (nats) of the token after each position under the trained weights; empty but on rank 0."""
        out = self.actor.token_logprobs(sequences, positions)
        return out if self.rank == 0 else []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def opsd_rehearse(self, scale: float | None) -> None:
        """Random values of this scale in place of every lora_B; None puts the trained ones back (``OpsdEngine.rehearse``)."""
        self.actor.rehearse(scale)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def opsd_adapter_stats(self) -> dict[str, Any]:
        """Number, dtypes and largest lora_B entry of the adapter tensors (``checks.adapter_stats``)."""
        return self.actor.adapter_stats()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def opsd_score_seconds(self) -> float:
        """Seconds in which this rank scored the rows of the last update."""
        return self.actor.score_seconds

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def opsd_samples(self) -> list[Sample]:
        """How busy and full this rank's device was since the last call (``metering``); the first one starts it."""
        self._meter = self._meter or Meter(here())
        return self._meter.take()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def opsd_export_adapter(self, folder: str) -> None:
        """Writes the trained adapter in PEFT's layout (``export.export_adapter``); rank 0 writes."""
        self.actor.export_adapter(folder)
