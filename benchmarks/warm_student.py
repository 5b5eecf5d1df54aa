"""Makes the warm tiny student: scripted experts, corpus, supervised training, export, and what it can do before and after.

    python benchmarks/warm_student.py OUT [--tokenizer] [--ship]

Experts play the training pairs of the pocket tasks with their gold patches, in the real harness, sandbox and grader, under the contract of
scale ``local``; what passes on the merged tree becomes a corpus; verl's SFT trainer trains a tiny student with random weights on it; then
the untouched and the trained student play the trained pairs and those of families that they have never seen. The student learns the
experts' replies by heart: it shows agents that act, not a model that can program. Its tokenizer has whole phrases of the harness'
prompts and of the experts' replies, so that prompts are short; ``--tokenizer`` trains that anew, ``--ship`` writes tokenizer and student
into the package (verl_opsd/models/warm), where scale ``local`` takes it from.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from verl_opsd.config import SandboxConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.dataset import load_subset, tree_hash
from verl_opsd.cooperbench.episode import run_episode
from verl_opsd.cooperbench.grading_pool import GradingPool
from verl_opsd.cooperbench.identity import harness_identity, identity_string
from verl_opsd.cooperbench.prepare import load_prepared
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.evaluation.shapes import Standing
from verl_opsd.evaluation.standings import standing
from verl_opsd.evaluation.statistics import fisher
from verl_opsd.models.tiny import MARKUP, PAD, TURN_END, TURN_START, WARM, ensure_tiny, make_tiny, make_tokenizer
from verl_opsd.paths import cache_dir
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.teachers.cache import tokenizer_hash
from verl_opsd.tokens import Episode, EpisodeStore, Gateway, Generation
from verl_opsd.verl_adapter.rollout.engine_core import EngineCore, Request
from verl_opsd.verl_adapter.rollout.engine_thread import EngineThread
from verl_opsd.verl_adapter.rollout.sampling import SamplingParams
from verl_opsd.verl_adapter.rollout.scripted import reply_text

ROOT = Path(__file__).resolve().parent.parent
PUBLISH = "git add -A && git commit -qm work && git push -q && gh pr create --title work --body work"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
#: The contract of the demo.
LIMITS = {k: v for k, v in yaml.safe_load((ROOT / "hydra_conf/contract/local.yaml").read_text()).items() if k != "defaults"}
#: One row a step and a high learning rate: a tiny model that learns a few texts by heart.
SETTINGS = ("data.train_batch_size=1", "optim.weight_decay=0.0", "optim.lr_warmup_steps_ratio=0.1", "optim.lr=5e-3")
#: What is shipped of a model's folder.
SHIPPED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
#: Entries of the student's tokenizer, bytes of its longest, and how often the experts' replies are counted in its training.
VOCAB, PHRASE, REPLIES = 6144, 32, 10


def expert(pair: PairTask, feature: int) -> list[dict[str, str]]:
    """Replies of an expert: apply the gold patch and publish, then submit."""
    patch = (pair.task_dir / f"feature{feature}" / "feature.patch").read_text()
    patch = re.sub(r"^(diff --git|index) .*\n", "", patch, flags=re.MULTILINE)
    return [{"command": f"git apply <<'P' && {PUBLISH}\n{patch}P"}, {"command": SUBMIT}]


def train_tokenizer(pairs: list[PairTask], work: Path) -> Any:
    """A tokenizer of the harness' messages, as they stand in one pair that is played, and of the experts' tasks and replies."""
    stock = ensure_tiny(cache_dir() / "models")
    (played,) = play(stock, pairs[:1], work, scripted=True, limits=LIMITS | {"max_tokens": 1024})
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(stock)
    texts = [(WARM.parent / "corpus.txt").read_text(), *(own.decode(t.new_ids) for t in played.turns for _ in pairs)]
    for pair in pairs:
        for feature in pair.features:
            texts.append((pair.task_dir / f"feature{feature}" / "feature.md").read_text())
            texts += [reply_text(r) for r in expert(pair, feature)] * REPLIES
    apart = re.compile("|".join(map(re.escape, (PAD, TURN_START, TURN_END, *MARKUP))))
    return make_tokenizer([part for text in texts for part in apart.split(text) if part], VOCAB, PHRASE)


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


def play(
    model: Path,
    pairs: list[PairTask],
    run: Path,
    scripted: bool,
    seed: int = 0,
    repeats: int = 1,
    limits: dict[str, Any] = LIMITS,
) -> list[Episode]:
    """Plays pairs with a model and records them as a run directory; one that is complete is read.

    Args:
        scripted: force the experts' replies through the model.
        repeats: episodes of each pair.
        limits: of the contract.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder
    from verl_opsd.verl_adapter.launch import prepare_missing
    from verl_opsd.verl_adapter.rollout.kv import ATTENTION

    prepare_missing(SandboxConfig(), pairs)
    tokenizer = AutoTokenizer.from_pretrained(model)
    contract = EvalContract(
        **limits,
        harness=identity_string(),
        templates_hash=harness_identity()["templates_hash"],
        tokenizer_hash=tokenizer_hash(tokenizer),
        dataset_hash=tree_hash(sorted({p.task_dir for p in pairs})),
        serving="embedded engine in this process",
    )
    write_json(run / "contract.json", contract.as_dict())
    write_json(run / "meta.json", {"student": str(model)})
    store = EpisodeStore(RunDir(run).episodes)
    if RunDir(run).episodes.exists() and len(there := list(store.episodes())) == len(pairs) * repeats:
        return there
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=ATTENTION).eval()
    core = EngineCore(loaded.requires_grad_(False), {tokenizer.eos_token_id}, contract.context_length, seed=seed)
    thread, turns = EngineThread(core), asyncio.Semaphore(contract.concurrency)
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
        with ThreadPoolExecutor(2 * contract.concurrency) as executor, contextlib.closing(GradingPool(1)) as grading:

            async def record(pair: PairTask, name: str) -> None:
                async with turns:
                    store.write(await one(pair, name, executor, grading))

            names = [(pair, f"{pair.split}-{r:05d}-{i:05d}-0") for r in range(repeats) for i, pair in enumerate(pairs)]
            await asyncio.gather(*(record(*n) for n in names))

    try:
        asyncio.run(every())
    finally:
        thread.close()
    return list(store.episodes())


def train(corpus: Path, model: Path, run: Path, epochs: int, *more: str) -> Path:
    """verl's SFT trainer on a corpus; the last checkpoint."""
    command = [sys.executable, "-m", "verl.trainer.sft_trainer", "+recipe=warm_start", "sft_scale=local", f"corpus={corpus}"]
    command += [f"model.path={model}", f"opsd.phases.all.epochs={epochs}", f"hydra.run.dir={run}", *SETTINGS, *more]
    subprocess.run(command, check=True, cwd=ROOT)
    step = (run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()
    return run / "checkpoints" / f"global_step_{step}"


def opsd(*words: str | Path) -> None:
    """``opsd WORDS``."""
    subprocess.run([sys.executable, "-m", "verl_opsd.cli.main", *map(str, words)], check=True)


def warm_up(untouched: Path, pairs: list[PairTask], out: Path, epochs: int) -> Path:
    """Experts, corpus, training and export: the folder of the trained student. What is there is not made again.

    The experts of one feature write the same in every pair, which is what is wanted here: near duplicates stay.
    """
    play(untouched, pairs, out / "experts", scripted=True)
    if not (out / "corpus").exists():
        opsd("corpus", "build", out / "experts", "--out", out / "corpus", "--eval", "pocket_eval", "--near-duplicate", "off")
    if not (out / "student").exists():
        checkpoint = train(out / "corpus", untouched, out / "sft", epochs)
        opsd(
            "export", checkpoint, "--out", out / "student", "--dtype", "float16", "--corpus", out / "corpus", "--max-new", "96"
        )
    return out / "student"


def passed(episodes: list[Episode]) -> list[PairTask | Any]:
    """(repository, features) of the pairs that passed whole."""
    return [(e.repo, e.features) for e in episodes if e.grade is not None and e.grade.reward == 1]


def table(before: dict[str, Standing], after: dict[str, Standing]) -> str:
    """Passes before and after, with 95% Wilson intervals and the p value of Fisher's exact test."""
    lines = ["| family | what | untouched | trained | p |", "|---|---|---|---|---|"]
    for family in before:
        for what in ("features", "pairs"):
            counts, cells = [], []
            for found in (getattr(arm[family], what) for arm in (before, after)):
                counts += [found.passed, found.total]
                cells.append(f"{found.passed} of {found.total} ({found.low:.0%} to {found.high:.0%})")
            lines.append(f"| {family} | {what} passed | {' | '.join(cells)} | {fisher(*counts):.2g} |")
    return "\n".join(lines)


def ship(student: Path) -> None:
    """Puts the student into the package, beside its README.md."""
    for file in student.iterdir():
        if file.name in SHIPPED:
            shutil.copyfile(file, WARM / file.name)


def main() -> None:
    """Runs every step; what is in OUT is not made again."""
    p = argparse.ArgumentParser(description="Makes the warm tiny student.")
    p.add_argument("out", type=Path)
    p.add_argument("--tokenizer", action="store_true", help="train the tokenizer anew, in place of the shipped one")
    p.add_argument("--ship", action="store_true", help="write the student into the package")
    p.add_argument("--epochs", type=int, default=25)
    p.add_argument("--repeats", type=int, default=2, help="episodes of each trained pair, before and after; of an unseen one 1")
    args = p.parse_args()
    from transformers import AutoTokenizer

    out, started = args.out.resolve(), time.time()
    pocket = load_subset("pocket_train", split="train")
    if not (out / "untouched").exists():
        tokenizer = train_tokenizer(pocket, out / "first") if args.tokenizer else AutoTokenizer.from_pretrained(WARM)
        make_tiny(out / "untouched", hidden_size=96, tokenizer=tokenizer)
    student = warm_up(out / "untouched", pocket, out, args.epochs)
    merged = passed(list(EpisodeStore(out / "experts" / "episodes").episodes()))
    families = {
        "trained": [p for p in pocket if (p.repo, p.features) in merged],
        "unseen": load_subset("pocket_eval", split="eval") + load_subset("pocket_test", split="test"),
    }
    found: dict[str, dict[str, Standing]] = {}
    for arm, model in (("untouched", out / "untouched"), ("trained", student)):
        found[arm] = {}
        for family, pairs in families.items():
            repeats = args.repeats if family == "trained" else 1
            found[arm][family] = standing(arm, play(model, pairs, out / f"{arm}-{family}", False, seed=1, repeats=repeats))
    print(table(found["untouched"], found["trained"]))
    print(f"{time.time() - started:.0f} s")
    if args.ship:
        ship(student)


if __name__ == "__main__":
    main()
