"""Every control arm and kind of teacher as a whole trainer run on one corpus; each is held against models that are run by hand."""

from __future__ import annotations

import functools
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from job import SHORT, Job, evidence, run_trainer, table, telemetry
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_opsd.cooperbench.dataset import dataset_folder, load_subset
from verl_opsd.cooperbench.pair_briefs import briefs_of
from verl_opsd.models.tiny import WARM, make_tiny

pytestmark = pytest.mark.slow
QUICK = ("opsd.loss.epochs=1", "trainer.test_freq=-1", *SHORT)
LR = 1e-3  # of the scale
TASKS = (("pocket_ledger_task", 1), ("pocket_textkit_task", 0))


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of the student's vocabulary, neither of them the student's."""
    root, tokenizer = tmp_path_factory.mktemp("teachers"), AutoTokenizer.from_pretrained(WARM)
    return {name: make_tiny(root / name, seed=seed, hidden_size=64, tokenizer=tokenizer) for name, seed in (("a", 5), ("b", 6))}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One round of two pairs of two repositories."""
    folder = tmp_path_factory.mktemp("corpus")
    tasks = [{"repo": repo, "task_id": task, "pairs": [[1, 2]]} for repo, task in TASKS]
    (folder / "two.json").write_text(json.dumps({"name": "two", "description": "a pair of each of two", "tasks": tasks}))
    own = (f"opsd.tasks.train={folder / 'two.json'}", "trainer.total_training_steps=1", "trainer.test_freq=-1")
    job = run_trainer(folder / "run", "+recipe=opd", *SHORT, *own)
    job.assert_done()
    return job


@pytest.fixture(scope="module")
def run(corpus: Job, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """``run(override, ...)``: that job on the corpus; once a module."""

    @functools.cache
    def of(*overrides: str) -> Job:
        folder = tmp_path_factory.mktemp("arm")
        job = run_trainer(folder, "+recipe=opd_offline", f"corpus={corpus.directory}", *QUICK, *overrides)
        assert job.returncode == 0, job.output[-6000:]
        assert (job.ours_left, job.all_left) == ([], [])  # there is no sandbox: nothing is collected or evaluated
        return job

    return of


@pytest.fixture(scope="module")
def url(teachers: dict[str, Path]) -> Iterator[str]:
    """A server in front of teacher a."""
    from logprob_server import make

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(make(str(teachers["a"]), limit=16384), host="127.0.0.1", port=port, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(timeout=10)


@functools.cache
def model(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def logprobs(path: Path, ids: list[int], at: list[int]) -> torch.Tensor:
    """[N, V] of a model at positions of one sequence."""
    return model(str(path))(input_ids=torch.tensor([ids])).logits[0, at].double().log_softmax(-1)


def branches(corpus: Job) -> list[tuple[str, list[int], list[int]]]:
    """Task, ids, and the positions that predict the agents' tokens, of each branch that the corpus holds; read without this project's
    code."""
    tasks = {e["episode_id"]: str(e) for e in table(corpus.directory, "episodes", "train")}
    whole: dict[tuple[str, str, int], list[int]] = {}
    at: dict[tuple[str, str, int], list[int]] = {}
    for t in sorted(table(corpus.directory, "turns", "train"), key=lambda t: (t["episode_id"], t["agent_id"], t["turn"])):
        key = (t["episode_id"], t["agent_id"], t["branch"])
        before = whole.get(key) or whole.get((*key[:2], t["parent_branch"]), [])
        ids = [*before[: t["start"]], *t["new_ids"]]
        at.setdefault(key, []).extend(range(len(ids) - 1, len(ids) - 1 + len(t["response_ids"])))
        whole[key] = [*ids, *t["response_ids"]]
    return [(tasks[key[0]], ids, at[key]) for key, ids in whole.items()]


def gaps(corpus: Job, path: Path, wanted: Callable[[str], bool] = lambda task: True) -> np.ndarray:
    """KL(student's base || model) in nats at every agent's token of the tasks that are wanted, sorted."""
    values = []
    for task, ids, at in branches(corpus):
        if wanted(task):
            p, q = logprobs(WARM, ids, at), logprobs(path, ids, at)
            values.append((p.exp() * (p - q)).sum(-1))
    return np.sort(torch.cat(values).numpy())


def last(job: Job, gate: str) -> dict:
    return evidence(job.directory, gate)[-1]


def first_step(job: Job) -> dict[str, np.ndarray]:
    (values,) = telemetry(job.directory)
    return {k: v[values["step"] == 0] for k, v in values.items() if k != "carried"}


def adapter(job: Job) -> dict[str, torch.Tensor]:
    (file,) = job.directory.glob("checkpoints/*/adapter/adapter_model.safetensors")
    return load_file(file)


def briefs(job: Job) -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = json.loads((job.directory / "briefs.json").read_text())
    return found


def specs() -> dict[str, dict[str, str]]:
    """SHA-256 of the peer spec's text, by pair and agent, of every pocket pair."""
    root = dataset_folder("pocket", "here")
    pairs = [p for s in ("train", "eval", "test") for p in load_subset(f"pocket_{s}", root, split=s)]  # type: ignore[arg-type]
    return {
        p.key: {a: hashlib.sha256(b.text.encode()).hexdigest() for a, b in briefs_of(p, "peer_spec").items()}  # type: ignore[union-attr]
        for p in pairs
    }


def device(teachers: dict[str, Path], name: str = "a") -> tuple[str, str]:
    return "teacher=device", f"opsd.teacher.path={teachers[name]}"


# ---- the arms ---------------------------------------------------------------------------------------------------------


def test_every_arm_trains_on_the_same_states_in_the_same_order(run: Any, teachers: dict[str, Path]) -> None:
    arms = [run(f"+arm={a}") for a in ("wrong_task", "identity", "sft", "role_announce")]
    arms += [run("+arm=unbriefed", *device(teachers)), run()]
    assert len({last(j, "states")["detail"] for j in arms}) == 1
    coefficients = [first_step(j)["coef"] for j in arms]
    assert all(np.array_equal(c, coefficients[0]) for c in coefficients) and coefficients[0].size > 100


def test_identity_ends_at_the_base(run: Any) -> None:
    job = run("+arm=identity")
    assert last(job, "identity_ends_at_base")["verdict"] == "pass" and last(job, "identity_ends_at_base")["value"] <= 1e-6
    assert first_step(job)["divergence"].max() <= 1e-6
    moved = max(float(v.abs().max()) for k, v in adapter(job).items() if "lora_B" in k)
    assert moved <= LR * 1.01  # one step of Adam, whose gradient is rounding if anything
    assert max(float(v.abs().max()) for k, v in adapter(run()).items() if "lora_B" in k) > 0.5 * LR


def test_wrong_task_reads_another_tasks_peer_spec(run: Any) -> None:
    known, wrong, right = specs(), briefs(run("+arm=wrong_task")), briefs(run())
    assert set(wrong) == set(right) and len(wrong) >= 2
    for pair, agents in wrong.items():
        for agent, brief in agents.items():
            elsewhere = {v[agent] for k, v in known.items() if k != pair}
            assert brief["name"] == "wrong_task" and brief["text_sha256"] in elsewhere
            assert brief["text_sha256"] != known[pair][agent] == right[pair][agent]["text_sha256"]
    own, other = (np.sort(first_step(run(*a))["divergence"]) for a in ((), ("+arm=wrong_task",)))
    assert np.abs(own - other).max() > 1e-3 and min(own.mean(), other.mean()) > 1e-4


def test_unbriefed_is_the_gap_between_the_models_and_nothing_else(run: Any, corpus: Job, teachers: dict[str, Path]) -> None:
    job = run("+arm=unbriefed", *device(teachers))
    assert np.sort(first_step(job)["divergence"]) == pytest.approx(gaps(corpus, teachers["a"]), abs=1e-4)
    assert {b["text_sha256"] for p in briefs(job).values() for b in p.values()} <= {hashlib.sha256(b"").hexdigest()}


def test_sft_is_the_likelihood_of_as_many_tokens(run: Any, corpus: Job) -> None:
    job = run("+arm=sft")
    own = [
        -logprobs(WARM, ids, at)[torch.arange(len(at)), torch.tensor(ids)[torch.tensor(at) + 1]]
        for _, ids, at in branches(corpus)
    ]
    assert np.sort(first_step(job)["divergence"]) == pytest.approx(np.sort(torch.cat(own).numpy()), abs=1e-4)
    assert first_step(job)["coef"].size == first_step(run())["coef"].size


def test_roles_read_a_brief_of_their_own(run: Any) -> None:
    found = {a: briefs(run(f"+arm={a}")) for a in ("role_announce", "role_context_only", "role_owner", "role_negotiate")}
    texts = {a: {(p, g): b["text_sha256"] for p, agents in f.items() for g, b in agents.items()} for a, f in found.items()}
    for place in texts["role_announce"]:
        assert len({t[place] for t in texts.values()}) == 4
    states = {last(run(f"+arm={a}"), "states")["detail"] for a in found}
    assert len(states) == 1


def test_a_preset_of_the_runs_on_record(run: Any, teachers: dict[str, Path]) -> None:
    """The menu, with another model in the 27B's place: a step an episode, the record's adapter, the student's 20 most probable tokens."""
    job = run("+experiment=seeds_negotiate", f"opsd.teacher.path={teachers['a']}", "opsd.teacher.dtype=float32")
    assert {(b["name"], b["kind"]) for agents in briefs(job).values() for b in agents.values()} == {
        ("menu_measured", "guidance")
    }
    (values,) = telemetry(job.directory)
    assert set(values["step"]) == {0, 1} and 0 < values["coverage_student"].min() <= values["coverage_student"].max() < 1
    (file,) = job.directory.glob("checkpoints/*/adapter/adapter_config.json")
    said = json.loads(file.read_text())
    assert (said["r"], said["lora_alpha"], len(said["target_modules"])) == (32, 64, 7)


def test_what_is_checkpointed_changes_no_bit_of_the_adapter(run: Any) -> None:
    checkpointed = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    want = adapter(run())
    for keep, said in (
        (("opsd.activations.keep=none", "opsd.activations.offload=true"), "activations: 0 of "),
        (("opsd.activations.keep=auto", "opsd.activations.device_gb=16"), "layers keep their activations"),
    ):
        job = run(checkpointed, *keep)
        assert said in job.output
        found = adapter(job)
        assert found.keys() == want.keys() and all(torch.equal(found[k], v) for k, v in want.items())


# ---- windows, and other teachers ---------------------------------------------------------------------------------------


def test_windows_score_every_position_once(run: Any, corpus: Job) -> None:
    # More than the view of any branch of one reply, less than the longest view.
    most = max(len(ids) for _, ids, _ in branches(corpus)) + 80
    whole = run()
    job = run("opsd.brief.too_long=window", f"opsd.brief.max_view_tokens={most}", "opsd.brief.window_context=64")
    said = evidence(job.directory, "view_windows")
    assert said and all(v["value"] >= 1 and v["threshold"] == most for v in said)
    assert last(job, "states")["detail"] == last(whole, "states")["detail"]
    assert np.array_equal(first_step(job)["coef"], first_step(whole)["coef"])
    assert np.abs(first_step(job)["divergence"] - first_step(whole)["divergence"]).max() > 0  # another teacher's view


def test_routed_scores_each_task_with_its_teacher(run: Any, corpus: Job, teachers: dict[str, Path]) -> None:
    members = [
        f"+opsd.teacher.members.{name}={{kind: device, path: {teachers[name]}, dtype: float32, tasks: [{repo}/task{task}]}}"
        for name, (repo, task) in zip("ab", TASKS, strict=True)
    ]
    job = run("+arm=unbriefed", "teacher=routed", *members)
    values = first_step(job)
    for number, (name, (repo, _)) in enumerate(zip("ab", TASKS, strict=True)):
        want = gaps(corpus, teachers[name], lambda task, repo=repo: repo in task)
        assert np.sort(values["divergence"][values["teacher"] == number]) == pytest.approx(want, abs=1e-4)


def test_server_scores_with_what_it_serves(run: Any, corpus: Job, teachers: dict[str, Path], url: str) -> None:
    """The divergence over its 20 most probable tokens, the sampled one, and one bucket for the rest, by hand."""
    k = 20
    job = run(
        *("+arm=unbriefed", "teacher=server", f"opsd.teacher.path={teachers['a']}", f"opsd.teacher.url={url}"),
        *("opsd.loss.support=teacher_topk", f"opsd.loss.top_k={k}"),
    )
    want = []
    for _, ids, at in branches(corpus):
        p, q = logprobs(WARM, ids, at), logprobs(teachers["a"], ids, at)
        kept = torch.zeros(q.shape, dtype=torch.bool).scatter(-1, q.topk(k, -1).indices, True)
        kept[torch.arange(len(at)), torch.tensor(ids)[torch.tensor(at) + 1]] = True
        term = (p.exp() * (p - q)).masked_fill(~kept, 0.0).sum(-1)
        rest = [(x.exp() * ~kept).sum(-1) for x in (p, q)]
        want.append(term + rest[0] * (rest[0].log() - rest[1].log()))
    assert np.sort(first_step(job)["divergence"]) == pytest.approx(np.sort(torch.cat(want).numpy()), abs=1e-3)
