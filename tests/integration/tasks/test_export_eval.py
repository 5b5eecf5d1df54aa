"""The harness' own ``eval`` on exported episodes: it reads the patches and gives the grade that was recorded."""

from __future__ import annotations

from pathlib import Path

from verl_opsd.cooperbench import grading
from verl_opsd.cooperbench.grading import grade_pair
from verl_opsd.cooperbench.grading_sandbox import grading_sandbox
from verl_opsd.cooperbench.types import PairTask, PreparedTask
from verl_opsd.evaluation.export import write_log_tree
from verl_opsd.tokens.records import AgentOutcome, Episode


def test_eval_of_the_harness_grades_the_export_as_recorded(
    pairs: dict[str, PairTask], prepared: dict[str, PreparedTask], tmp_path: Path
) -> None:
    pair, task = pairs["textkit/1+2"], prepared["textkit"]
    package = grading._package()
    from cooperbench.eval.evaluate import _evaluate_single
    from cooperbench.eval.runs import discover_runs

    gold = [(pair.task_dir / f"feature{f}" / "feature.patch").read_text() for f in pair.features]
    for name, patches in (("both", gold), ("one", [gold[0], ""])):
        agents = tuple(
            AgentOutcome(f"agent{n}", f, "Submitted", 1, patches[n - 1], 0, True) for n, f in enumerate(pair.features, 1)
        )
        grade = grade_pair(pair, task, *patches)
        messages = {a.agent_id: [{"role": "user", "content": "task"}] for a in agents}
        values = {"split": "eval", "contract_hash": "c", "outcome": "scored", "turns": (), "agents": agents, "grade": grade}
        e = Episode("e", pair.repo, pair.task_id, pair.features, **values, brief_kinds={}, model_version=0, messages=messages)
        write_log_tree([e], tmp_path, name, None, grades=False)
        (run,) = discover_runs(name, logs_dir=tmp_path)
        with (
            grading_sandbox(task, pair.dataset_dir, {}, backend="bubblewrap", allow_unsafe=False, timeout_s=60) as box,
            package.get_backend.open(grading._Backend(box, package.get_image_name(pair.repo, pair.task_id))) as backend,
        ):
            found = _evaluate_single(run, backend=backend, dataset_dir=str(pair.dataset_dir))
        assert found["error"] is None and found["merge"]["status"] == grade.merge
        assert [found[f"feature{n}"]["passed"] for n in (1, 2)] == [f.passed for f in grade.features]
        assert found["both_passed"] is (name == "both") and found["apply_status"] == grade.apply_status
