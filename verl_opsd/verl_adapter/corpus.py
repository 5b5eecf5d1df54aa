"""Offline training: the episodes of an earlier run become the rows of one update, under the same contract."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_opsd.config import OpsdConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError
from verl_opsd.evidence.graded import require_untouched
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.records import Episode
from verl_opsd.tokens.store import EpisodeStore


@functools.lru_cache(maxsize=2)
def _read(path: str) -> tuple[Episode, ...]:
    run = RunDir(Path(path))
    return tuple(e for e in EpisodeStore(run.episodes).episodes() if e.split == "train" and e.scored and e.turns)


def episodes(opsd: OpsdConfig) -> tuple[Episode, ...]:
    """Scored training episodes of the corpus, in the order of their ids."""
    assert opsd.corpus is not None
    return _read(str(Path(opsd.corpus).expanduser().resolve()))


def size(opsd: OpsdConfig) -> int:
    """Episodes of the corpus."""
    return len(episodes(opsd))


def check_corpus(opsd: OpsdConfig, contract: EvalContract, evaluation: list[PairTask]) -> None:
    """The corpus exists, was collected under this contract, holds something to train on and nothing that is evaluated.

    The hashes of tasks and pairs are left out of the comparison: they cover the evaluation tasks of either run too, and the
    episodes name their own.

    Raises:
        OpsdError: see above; or the corpus' evidence or graded episodes were changed.
    """
    assert opsd.corpus is not None
    run = RunDir(Path(opsd.corpus).expanduser())
    if not (run.path / "contract.json").is_file() or not run.episodes.is_dir():
        raise OpsdError(
            f"corpus={opsd.corpus}",
            "a corpus is a run directory with contract.json and episodes/",
            "give the directory of a finished `+recipe=opd` run",
        )
    require_untouched(run.path, "corpus")
    theirs, stored = run.contract(), EpisodeStore(run.episodes).contract_hash
    if stored not in (None, theirs.hash):
        raise OpsdError(
            f"corpus {run.path}: episodes of contract {str(stored)[:12]} beside contract.json of {theirs.hash[:12]}",
            "contract.json is the contract that the episodes were collected under",
            "restore contract.json, or collect again",
        )
    contract.require_same(theirs, f"corpus {run.path}", opsd.varies, without=("dataset_hash", "subset_hash"))
    if not episodes(opsd):
        raise OpsdError(f"corpus={opsd.corpus} has no scored training episode", "there is nothing to train on", "collect again")
    if opsd.loss.task_reward_coef > 0 and size(opsd) < 2:
        raise OpsdError(
            f"corpus={opsd.corpus} of one episode with opsd.loss.task_reward_coef={opsd.loss.task_reward_coef}",
            "an advantage compares an episode with the others of its round",
            "give a corpus of more episodes, or set opsd.loss.task_reward_coef=0",
        )
    from verl_opsd.cooperbench.dataset import assert_disjoint

    what = (f"the corpus ({opsd.corpus})", f"evaluation (opsd.tasks.eval={opsd.tasks.eval})")
    assert_disjoint([pair_of(opsd, e) for e in episodes(opsd)], evaluation, level=opsd.tasks.disjoint, what=what)


def corpus_pairs(opsd: OpsdConfig) -> list[PairTask]:
    """The pairs of the corpus, each once, sorted by key."""
    pairs = {pair.key: pair for pair in (pair_of(opsd, e) for e in episodes(opsd))}
    return [pairs[k] for k in sorted(pairs)]


def pair_of(opsd: OpsdConfig, episode: Episode) -> PairTask:
    """The task of a stored episode, for its brief.

    Raises:
        OpsdError: its task texts are not in the configured dataset, so that its brief can't be made.
    """
    from verl_opsd.cooperbench.dataset import dataset_folder

    pair = PairTask(
        dataset_folder(opsd.tasks.dataset, "opsd.tasks.dataset"), episode.repo, episode.task_id, episode.features, episode.split
    )
    missing = [f for f in pair.features if not (pair.task_dir / f"feature{f}" / "feature.md").is_file()]
    if missing:
        raise OpsdError(
            f"episode {episode.episode_id}: no text of features {missing} of {pair.repo}/task{pair.task_id}",
            "every training state must have its brief",
            "set opsd.tasks.dataset to the dataset that the corpus was collected on",
        )
    return pair


def enqueue(trainer: Any) -> None:
    """Puts every episode's rows into TransferQueue as a finished prompt, as verl's agent-loop worker would."""
    from verl_opsd.verl_adapter.episode_rows import episode_outputs

    for n, episode in enumerate(episodes(trainer.opsd)):
        uid = f"corpus{n:06d}"
        keys, fields, tags = [], [], []
        for i, output in enumerate(episode_outputs(trainer.opsd, pair_of(trainer.opsd, episode), episode, trainer.tokenizer)):
            row = output.as_dict()
            input_ids = torch.cat([row["prompts"], row["responses"]])
            version = output.extra_fields["max_global_steps"]
            row |= {
                "uid": uid,
                "loss_mask": row["response_mask"],
                "input_ids": input_ids,
                "position_ids": torch.arange(input_ids.numel()),
                "multi_modal_inputs": {},
            }
            keys.append(f"{uid}_0_{i}")
            fields.append(row)
            tags.append(
                {
                    "status": "success",
                    "prompt_len": row["prompts"].numel(),
                    "response_len": row["responses"].numel(),
                    "seq_len": input_ids.numel(),
                    "global_steps": trainer.global_steps,
                    "min_global_steps": version,
                    "max_global_steps": version,
                }
            )
        tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train")
        done = {"is_prompt": True, "status": "finished", "global_steps": trainer.global_steps}
        tq.kv_batch_put(keys=[uid], tags=[done], partition_id="train")
