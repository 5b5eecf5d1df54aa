"""Full-set evaluation through verl's validation: what is planned and not yet on record runs, once each, and is graded alone too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_opsd.config import OpsdConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.corpus.card import spread, spread_lines
from verl_opsd.corpus.select import Selection
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.alone import grade_alone
from verl_opsd.evaluation.model_size import model_size
from verl_opsd.evaluation.plan import Progress, missing, read_plan, running, set_aside_faults, write_plan
from verl_opsd.evaluation.standings import standing
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.store import EpisodeStore


def prepare(config: DictConfig, opsd: OpsdConfig, run: RunDir, pairs: list[PairTask], contract: EvalContract) -> None:
    """Writes the plan, prints what the design can show, and moves faulty episodes of an earlier start aside."""
    model = config.actor_rollout_ref.model
    parameters, active = model_size(Path(str(model.path)).expanduser())
    known = {
        "path": str(model.path),
        "adapter": OmegaConf.select(model, "lora_adapter_path"),
        "parameters": parameters,
        "active_parameters": active,
    }
    keys = ("serving", "tool_parser", "reasoning_parser", "step_limit", "max_tokens", "context_length", "temperature")
    serving = {k: str(v) for k, v in contract.as_dict().items() if k in keys}
    print(f"verl-opsd: {write_plan(run, pairs, opsd.evaluation.seeds, known, serving)}", flush=True)
    if run.episodes.is_dir():
        set_aside_faults(run)


def evaluate(trainer: Any, validate: Callable[[], Any]) -> dict[str, float]:
    """Runs what is missing, grades patches alone, and gives the rates as verl's metrics.

    verl's own means are not used: they count an episode that a fault ended as a score of zero.

    Raises:
        OpsdError: an episode of the plan left no record.
    """
    from torch.utils.data import Subset
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.utils.dataset.rl_dataset import collate_fn

    run, opsd = trainer.run_dir, trainer.opsd
    contract = run.contract()
    store = EpisodeStore(run.episodes)
    planned = len(read_plan(run)["planned"])
    rows = missing(run, store)
    if len(rows) < planned:
        print(f"verl-opsd: {planned - len(rows)} of {planned} episodes are on record; {len(rows)} run", flush=True)
    if rows:
        trainer.progress = Progress(store, planned)
        trainer.val_dataloader = StatefulDataLoader(
            Subset(trainer.val_dataset, rows), batch_size=len(rows), num_workers=0, shuffle=False, collate_fn=collate_fn
        )
        validate()
        trainer.progress = None
    lost = missing(run, store)
    if lost:
        raise OpsdError(
            f"{len(lost)} of {planned} episodes left no record",
            "an episode ends scored or as a named fault; one that ends in another error is a bug or bad input",
            "read the error of the agent-loop worker in this output (`Error in _run_prompt`); start again with the same "
            "hydra.run.dir to run what is missing",
        )
    episodes = list(store.episodes())
    if opsd.evaluation.alone:
        faults = grade_alone(
            run,
            episodes,
            Path(trainer.val_dataset[0]["extra_info"]["pair"]["dataset_dir"]),
            backend=opsd.sandbox.backend,
            allow_unsafe=opsd.sandbox.allow_unsafe,
            timeout_s=contract.grade_timeout_s,
            workers=contract.concurrency,
        )
        run.evidence("graded_alone", len(episodes) - len(faults), None, None, str(faults or ""))
    print(f"verl-opsd: {running(episodes, planned)}", flush=True)
    if opsd.recipe == "collect":
        found = Selection()
        for episode, agent in ((e, a) for e in episodes if e.scored for a in e.agents):
            found.count(episode, agent.agent_id, "feature")
        print("\n".join(spread_lines(spread(found.attempts, found.successes))), flush=True)
    row = standing("eval", episodes)
    counts = {"planned": float(planned), "ran": float(row.ran), "scored": float(row.scored)}
    rates = {k: r.value for k, r in (("features", row.features), ("pairs", row.pairs)) if r.value is not None}
    return {f"opsd/{k}": v for k, v in (counts | rates).items()}
