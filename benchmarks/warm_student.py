"""Makes the warm tiny student: scripted experts, corpus, supervised training, export, and what it can do before and after.

    python benchmarks/warm_student.py OUT [--steps N] [--lr X]

Experts play the training pairs of the pocket tasks with their gold patches, in the real harness, sandbox and grader; what passes on the
merged tree becomes a corpus; verl's SFT trainer trains the tiny student on it; then the untouched and the trained student play the
trained pairs and the pairs of the family that it has never seen. The student learns the experts' replies by heart: it shows agents that
act, not a model that can program.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from verl_opsd.config import SandboxConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.dataset import load_subset, tree_hash
from verl_opsd.cooperbench.episode import run_episode
from verl_opsd.cooperbench.grading_pool import GradingPool
from verl_opsd.cooperbench.identity import harness_identity, identity_string
from verl_opsd.cooperbench.prepare import load_prepared
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.evaluation.report import standings
from verl_opsd.models.tiny import ensure_tiny
from verl_opsd.paths import cache_dir
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.teachers.cache import tokenizer_hash
from verl_opsd.tokens import Episode, EpisodeStore, Gateway, Generation
from verl_opsd.verl_adapter.rollout.engine_core import EngineCore, Request
from verl_opsd.verl_adapter.rollout.engine_thread import EngineThread
from verl_opsd.verl_adapter.rollout.sampling import SamplingParams
from verl_opsd.verl_adapter.rollout.scripted import reply_text

PUBLISH = "git add -A && git commit -qm work && git push -q && gh pr create --title work --body work"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
#: The contract of the demo (hydra_conf/contract/local.yaml), with room for an expert's reply.
LIMITS = {
    "step_limit": 4,
    "command_timeout_s": 20.0,
    "wall_limit_s": 120.0,
    "max_tokens": 640,
    "context_length": 12288,
    "concurrency": 2,
}


#: One row a step and a high learning rate: a tiny model that learns a few texts by heart.
SETTINGS = ("data.train_batch_size=1", "optim.weight_decay=0.0", "optim.lr_warmup_steps_ratio=0.1", "trainer.save_freq=20")
#: The family of tasks that the student is trained on; the other pocket tasks are those that it has never seen.
FAMILY = "pocket_textkit_task"


def expert(pair: PairTask, feature: int) -> list[dict[str, str]]:
    """Replies of an expert: apply the gold patch and publish, then submit."""
    patch = (pair.task_dir / f"feature{feature}" / "feature.patch").read_text()
    return [{"command": f"git apply <<'P' && {PUBLISH}\n{patch}P"}, {"command": SUBMIT}]


class LocalEngine:
    """The gateway's engine over the embedded one; with a script its replies are forced."""

    def __init__(self, thread: EngineThread, tokenizer: Any, script: dict[str, list[dict[str, str]]] | None):
        self.thread, self.tokenizer, self.script = thread, tokenizer, script

    async def generate(self, prompt_ids, *, session, turn, sampling) -> Generation:
        forced = None
        if self.script is not None:
            text = reply_text(self.script[session.split("/")[1]][turn])
            ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
            forced = np.asarray(ids, np.int32)
        params = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, max_tokens=sampling.max_tokens
        )
        request = Request(uuid.uuid4().hex, np.asarray(prompt_ids, np.int32), params, session, turn, forced)
        out = await asyncio.wrap_future(self.thread.generate(request))
        return Generation(out.token_ids, out.logprobs, out.stop_reason, 0)


def play(model: Path, pairs: list[PairTask], run: Path, scripted: bool, seed: int = 0, repeats: int = 1) -> list[Episode]:
    """Plays pairs with a model and records them as a run directory.

    Args:
        scripted: force the experts' replies through the model.
        repeats: episodes of each pair.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder
    from verl_opsd.verl_adapter.launch import prepare_missing
    from verl_opsd.verl_adapter.rollout.kv import ATTENTION

    opsd: Any = dataclasses.make_dataclass("Parts", ["contract", "sandbox"])(EvalContract(**LIMITS), SandboxConfig())
    prepare_missing(opsd, pairs)
    tokenizer = AutoTokenizer.from_pretrained(model)
    contract = dataclasses.replace(
        opsd.contract,
        harness=identity_string(),
        templates_hash=harness_identity()["templates_hash"],
        tokenizer_hash=tokenizer_hash(tokenizer),
        dataset_hash=tree_hash(sorted({p.task_dir for p in pairs})),
        serving="embedded engine in this process",
    )
    write_json(run / "contract.json", contract.as_dict())
    write_json(run / "meta.json", {"student": str(model)})
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=ATTENTION).eval()
    core = EngineCore(loaded.requires_grad_(False), {tokenizer.eos_token_id}, contract.context_length, seed=seed)
    thread, store = EngineThread(core), EpisodeStore(RunDir(run).episodes)
    builder = VerlTokenBuilder(tokenizer, AutoConfig.from_pretrained(model).model_type)
    parser = VerlReplyParser(tokenizer, contract.tool_parser)

    async def one(pair: PairTask, name: str, executor: ThreadPoolExecutor, grading: GradingPool) -> Episode:
        script = {f"agent{i + 1}": expert(pair, f) for i, f in enumerate(pair.features)} if scripted else None
        gateway = Gateway(LocalEngine(thread, tokenizer, script), builder, parser, contract)
        sessions = {a: gateway.session(name, a) for a in ("agent1", "agent2")}
        prepared = load_prepared(cache_dir(), pair.repo, pair.task_id)
        episode, fault = await run_episode(
            pair, prepared, sessions, contract, episode_id=name, work_dir=run / "work", agents=executor, grading=grading
        )
        if fault is not None:
            raise fault
        return episode

    async def every() -> None:
        with ThreadPoolExecutor(4) as executor, contextlib.closing(GradingPool(1)) as grading:
            for r in range(repeats):
                for i, pair in enumerate(pairs):
                    store.write(await one(pair, f"{pair.split}-{r:05d}-{i:05d}-0", executor, grading))

    try:
        asyncio.run(every())
    finally:
        thread.close()
    return list(store.episodes())


def train(corpus: Path, model: Path, run: Path, epochs: int, lr: float, *more: str) -> None:
    """verl's SFT trainer on a corpus."""
    command = [sys.executable, "-m", "verl.trainer.sft_trainer", "+recipe=warm_start", "sft_scale=local", f"corpus={corpus}"]
    command += [f"model.path={model}", f"opsd.phases.all.epochs={epochs}", f"optim.lr={lr}", f"hydra.run.dir={run}", *more]
    subprocess.run(command, check=True)


def build_corpus(runs: list[Path], out: Path) -> None:
    """`opsd corpus build`; the experts of one feature write the same in every pair, which is what is wanted here."""
    command = [sys.executable, "-m", "verl_opsd.cli.main", "corpus", "build", *map(str, runs), "--out", str(out)]
    subprocess.run([*command, "--eval", "pocket_eval", "--near-duplicate", "off"], check=True)


def export(checkpoint: Path, out: Path) -> None:
    """`opsd export`."""
    subprocess.run(
        [sys.executable, "-m", "verl_opsd.cli.main", "export", str(checkpoint), "--out", str(out), "--dtype", "float32"],
        check=True,
    )


def table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Passes before and after, with 95% Wilson intervals."""
    lines = ["| family | what | untouched | trained |", "|---|---|---|---|"]
    for family in before:
        for what in ("features", "pairs"):
            cells = []
            for found in (before[family][what], after[family][what]):
                low, high = found["ci95"]
                cells.append(f"{found['passed']} of {found['total']} ({low:.0%} to {high:.0%})")
            lines.append(f"| {family} | {what} passed | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main() -> None:
    """Runs every step; a step whose folder is there is not run again."""
    p = argparse.ArgumentParser(description="Makes the warm tiny student.")
    p.add_argument("out", type=Path)
    p.add_argument("--epochs", type=int, default=65)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--repeats", type=int, default=4, help="episodes of each trained pair, before and after; of an unseen one 1")
    args = p.parse_args()
    out, started = args.out, time.time()
    student = ensure_tiny(cache_dir() / "models")
    pocket = load_subset("pocket_train", split="train")
    experts = [pair for pair in pocket if pair.repo == FAMILY]
    if not (out / "corpus").exists():
        if not (out / "experts").exists():
            play(student, experts, out / "experts", scripted=True)
        build_corpus([out / "experts"], out / "corpus")
    if not (out / "student").exists():
        train(out / "corpus", student, out / "sft", args.epochs, args.lr, *SETTINGS)
        step = (out / "sft" / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()
        export(out / "sft" / "checkpoints" / f"global_step_{step}", out / "student")
    passed = {
        (e.repo, e.features) for e in EpisodeStore(out / "experts" / "episodes").episodes() if e.grade and e.grade.reward == 1
    }
    families = {
        "trained pairs": [p for p in experts if (p.repo, p.features) in passed],
        "unseen families": [p for p in pocket if p.repo != FAMILY] + load_subset("pocket_eval", split="eval"),
    }
    found: dict[str, dict[str, Any]] = {}
    for arm, model in (("untouched", student), ("trained", out / "student")):
        found[arm] = {}
        for i, (family, pairs) in enumerate(families.items()):
            run = out / f"{arm}-{i}"
            played = list(EpisodeStore(run / "episodes").episodes()) if (run / "episodes").exists() else None
            found[arm][family] = standings(
                played or play(model, pairs, run, scripted=False, seed=1, repeats=args.repeats if i == 0 else 1)
            )
    print(table(found["untouched"], found["trained"]))
    print(f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
