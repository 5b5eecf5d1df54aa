"""The classes of the trainer mode ``counting``."""

from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1.trainer_base import register_trainer

from verl_opsd.verl_adapter.trainer import OpsdTrainer
from verl_opsd.verl_adapter.worker import OpsdTrainingWorker, OpsdWorker


class CountingTrainingWorker(OpsdTrainingWorker):
    """Sees every batch of its rank."""

    tokens = 0

    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        self.tokens += data["input_ids"].values().numel()
        return super().train_mini_batch(data)


class CountingWorker(OpsdWorker):
    """The Ray actor; a decorated method can be called from the trainer on all ranks."""

    actor_worker_cls = CountingTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tokens_seen(self) -> int:
        return self.actor.tokens


@register_trainer("counting")
class CountingTrainer(OpsdTrainer):
    worker_cls = CountingWorker

    def on_step_end(self) -> None:
        super().on_step_end()
        self.run_dir.evidence("tokens_seen", sum(self.actor_rollout_wg.tokens_seen()), None, True, "student tokens so far")
