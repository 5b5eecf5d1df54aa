"""Supervised training on stored ids: verl's SFT trainer with the loss-position head in place of full logits.

`SftEngine` is chosen by verl's engine registry (vendor key ``opsd_sft``). The loss of a step is the mean negative log-likelihood of its
loss tokens over the whole global batch, whatever the micro-batches and ranks are; optionally times a surprisal gate, which enters no
denominator, and plus an anchor, the mean divergence from the untouched model at the same positions.

Suffixes: N loss positions.
"""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine.base import EngineRegistry

from verl_opsd.distill.head import HeadTask
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.weights import SurprisalGate
from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.engine import OpsdEngine
from verl_opsd.verl_adapter.loss import OpsdLoss
from verl_opsd.verl_adapter.passes import jagged, layout_index, own_passes, signal_of


@dataclass(frozen=True)
class SftLoss:
    """How the likelihood is computed and weighted.

    Attributes:
        chunk: loss positions per chunk of the vocabulary head.
        gate: (kappa, gamma) of a weight sigmoid(kappa * (log p(token) - gamma)); None: no gate.
        anchor: weight of KL(model || untouched model) over the full vocabulary, mean over loss tokens; 0: no anchor.
    """

    chunk: int = 256
    gate: tuple[float, float] | None = None
    anchor: float = 0.0

    @property
    def spec(self) -> LossSpec:
        """Of the likelihood."""
        return LossSpec("nll", weights=() if self.gate is None else (SurprisalGate(*self.gate),))

    def weighted_nll(self, log_probs_N: Tensor) -> Tensor:
        """Gated negative log-likelihoods, float[N], with gradient; the gate has none."""
        if self.gate is None:
            return -log_probs_N
        return -SurprisalGate(*self.gate).of(log_probs_N.detach()) * log_probs_N


@dataclass
class SftEngineConfig(FSDPEngineConfig):
    """verl's configuration of an FSDP engine, and ``sft``: ``chunk``, ``gate`` (``kappa``, ``gamma``, or None), ``anchor``."""

    sft: dict[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> SftLoss:
        """The loss of these values."""
        gate = self.sft.get("gate")
        return SftLoss(
            int(self.sft.get("chunk", 256)),
            None if gate is None else (float(gate["kappa"]), float(gate["gamma"])),
            float(self.sft.get("anchor", 0.0)),
        )


def positions_of(mask: Tensor) -> Tensor:
    """Predicting positions of a row's loss tokens, int64[N]: t where ``mask[t + 1]`` is 1.

    Raises:
        OpsdError: the first token has loss.
    """
    if bool(mask[:1].any()):
        raise OpsdError("a row whose first token has loss", "a token needs one before it that predicts it", "correct the mask")
    return mask[1:].nonzero()[:, 0]


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cuda", vendor="opsd_sft")
class SftEngine(OpsdEngine):
    """See the head of this file."""

    engine_config: SftEngineConfig

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        """verl's loop over micro-batches; one row each where rows that share a forward would see each other (hybrid layers)."""
        if not self.shares_forwards():
            tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
        if self.engine_config.loss.anchor and not forward_only:
            data["opsd_base"] = jagged(self._base_states(data))
        return super().forward_backward_batch(data, loss_function, forward_only)

    @property
    def _untouched(self) -> OpsdLoss:
        """Names the weights of the anchor: the adapter off, or the initial ones."""
        return OpsdLoss(reference="adapter_off" if self._is_lora else "initial")

    def _base_states(self, data: TensorDict) -> list[Tensor]:
        """Hidden states [N_r, H] of the untouched model at each row's loss positions."""
        ids, positions = data["input_ids"].unbind(), [positions_of(m) for m in data["loss_mask"].unbind()]
        passes = own_passes([{"input_ids": x, "opsd_position": p} for x, p in zip(ids, positions, strict=True)])
        return self.score_passes(passes, [len(p) for p in positions], self._untouched)

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's; an anchor keeps the weights as they were before. The place in the rows, which verl reads next, is there.

        Raises:
            OpsdError: a file of the checkpoint is cut off or gone.
        """
        if self.engine_config.loss.anchor:
            self.keep(self._untouched)
        place = Path(local_path) / f"data_{self.get_data_parallel_rank()}.pt"
        try:
            super().load_checkpoint(local_path, *args, **kwargs)
            torch.load(place, map_location="cpu", weights_only=False)  # verl starts at the first row where it is gone
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise OpsdError(
                f"{local_path}: {error}",
                "a run goes on from its last checkpoint",
                "name an earlier step in checkpoints/latest_checkpointed_iteration.txt, or start in another hydra.run.dir",
            ) from error

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> tuple[Tensor, dict]:
        """One micro-batch; ``loss_function``, verl's own for SFT, names nothing that is not here.

        Returns:
            The loss times the data-parallel size (FSDP averages over ranks), and verl's record.
        """
        batch, loss, ranks = micro_batch.to(get_device_id()), self.engine_config.loss, self.get_data_parallel_size()
        tu.assign_non_tensor(batch, temperature=1.0)
        ids, positions = batch["input_ids"].unbind(), [positions_of(m) for m in batch["loss_mask"].unbind()]
        packed = tu.get_non_tensor_data(batch, "use_remove_padding", True)
        counts = [len(p) for p in positions]
        coef_N = torch.full((sum(counts),), ranks / batch["batch_num_tokens"], device=get_device_id())
        task = HeadTask(
            kind="loss",
            index_N=layout_index([len(x) for x in ids], positions, packed),
            labels_N=torch.cat([x[p + 1] for x, p in zip(ids, positions, strict=True)]),
            coef_N=coef_N,
            loss=loss.spec,
            chunk=loss.chunk,
        )
        if loss.anchor and not forward_only:  # the likelihood is then a term of the head's log-probabilities
            name, weight_VH = self._heads_of(self._untouched)[1]
            task = dataclasses.replace(
                task,
                coef_N=None,
                loss=LossSpec(),
                policy=True,
                anchor=signal_of(batch, "opsd_base", counts, name),
                anchor_weight_VH=weight_VH,
                anchor_coef_N=loss.anchor * coef_N,
            )
        out = self.run(batch, task).sum()
        if task.policy:
            assert task.log_probs_N is not None
            out = out + (coef_N * loss.weighted_nll(task.log_probs_N)).sum()
        record: dict[str, Any] = {"model_output": {}, "loss": self.over_sequence(out).item(), "metrics": {}}
        return out * self.ulysses_sequence_parallel_size, record
