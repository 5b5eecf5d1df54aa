"""Fields of the contract that are found: serving as one line, and jobs of one sweep."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.dataset import tree_hash
from verl_opsd.cooperbench.sandbox import BACKENDS, traits
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.verl_adapter.found import check_siblings, check_tasks_unchanged, record_tasks, serving, task_folders

CONFIG = {
    "actor_rollout_ref": {
        "rollout": {
            "name": "vllm",
            "tensor_model_parallel_size": 2,
            "data_parallel_size": 1,
            "dtype": "bfloat16",
            "max_num_seqs": 256,
            "gpu_memory_utilization": 0.5,
            "engine_kwargs": {"vllm": {"kv_cache_dtype": "auto"}, "opsd": {"threads": 1}},
        }
    },
    "trainer": {"nnodes": 2, "n_gpus_per_node": 4},
}


def line(**changes: object) -> str:
    values = copy.deepcopy(CONFIG)
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = values
        for p in parents:
            node = node[p]
        node[last] = value
    return serving(OmegaConf.create(values))


def test_layout_is_told() -> None:
    words = line().split()
    assert words[0] == "vllm" and {"tp=2", "dp=1", "pp=1", "replicas=4", "dtype=bfloat16", "max_num_seqs=256"} <= set(words)


@pytest.mark.parametrize(
    "changes",
    [
        {"actor_rollout_ref__rollout__tensor_model_parallel_size": 4},
        {"actor_rollout_ref__rollout__data_parallel_size": 2},
        {"actor_rollout_ref__rollout__dtype": "float16"},
        {"actor_rollout_ref__rollout__max_num_seqs": 8},
        {"actor_rollout_ref__rollout__engine_kwargs__vllm": {"kv_cache_dtype": "fp8"}},
        {"actor_rollout_ref__rollout__name": "sglang"},
        {"trainer__nnodes": 1},
    ],
)
def test_what_decides_how_a_model_is_served_changes_the_line(changes: dict[str, object]) -> None:
    assert line(**changes) != line()


@pytest.mark.parametrize(
    "changes",
    [
        {"actor_rollout_ref__rollout__gpu_memory_utilization": 0.9},
        {"actor_rollout_ref__rollout__engine_kwargs__opsd": {"threads": 8}},
    ],
)
def test_capacity_does_not(changes: dict[str, object]) -> None:
    assert line(**changes) == line()


def test_task_files_are_those_that_the_run_began_with(tmp_path: Path) -> None:
    """Names whose order as text is not their order as paths."""
    pairs = [PairTask(tmp_path / "data", repo, 1, (1, 2)) for repo in ("a-b_task", "a_task", "a")]
    for pair in pairs:
        pair.task_dir.mkdir(parents=True)
        (pair.task_dir / "runner.sh").write_text(pair.repo)
    opsd = SimpleNamespace(tasks=SimpleNamespace(test="locked", look="the final table"))
    run = RunDir(tmp_path / "run")
    contract = EvalContract(dataset_hash=tree_hash(task_folders(pairs)))
    write_json(run.path / "contract.json", contract.as_dict())
    record_tasks(run, opsd, pairs[:2], pairs[2:])
    check_tasks_unchanged(run)
    (pairs[1].task_dir / "runner.sh").write_text("another")
    with pytest.raises(OpsdError, match="tasks_unchanged"):
        check_tasks_unchanged(run)
    lines = [json.loads(line) for line in (run.path / "evidence.jsonl").read_text().splitlines()]
    assert [(g["gate"], g["verdict"]) for g in lines] == [
        ("locked_look", "recorded"),
        ("tasks_unchanged", "pass"),
        ("tasks_unchanged", "fail"),
    ]


def test_every_backend_tells_what_it_does_otherwise() -> None:
    told = {backend: traits(backend) for backend in BACKENDS}
    assert len(set(told.values())) == len(BACKENDS) and all("memory_bytes=" in text for text in told.values())


def sweep(folder: Path, *contracts: EvalContract) -> list[RunDir]:
    (folder / "multirun.yaml").touch()
    runs = [RunDir(folder / str(n)) for n in range(len(contracts))]
    for run, contract in zip(runs, contracts, strict=True):
        write_json(run.path / "contract.json", contract.as_dict())
    return runs


def test_jobs_of_a_sweep_vary_the_declared_field_alone(tmp_path: Path) -> None:
    base = EvalContract()
    other = dataclasses.replace(base, step_limit=100)
    both = dataclasses.replace(other, temperature=0.5)
    runs = sweep(tmp_path, base, base, base)
    check_siblings(runs[2], base, None)
    check_siblings(runs[2], other, "step_limit")
    with pytest.raises(OpsdError, match=r"job 0 of the sweep .*step_limit: 200 there, 100 here"):
        check_siblings(runs[2], other, None)
    with pytest.raises(OpsdError, match=r"\(temperature: 1.0 there, 0.5 here\)"):
        check_siblings(runs[2], both, "step_limit")


def test_runs_that_only_lie_side_by_side_are_no_sweep(tmp_path: Path) -> None:
    runs = sweep(tmp_path, EvalContract(), EvalContract())
    (tmp_path / "multirun.yaml").unlink()
    check_siblings(runs[1], EvalContract(step_limit=3), None)
