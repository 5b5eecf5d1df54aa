"""`opsd standings --grade-alone`: each patch of a pair on both suites, in the sandbox that grades."""

import json

from verl_opsd.cli.main import main
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.dataset import POCKET_DIR
from verl_opsd.cooperbench.prepare import prepare
from verl_opsd.rundir import write_json
from verl_opsd.tokens.records import AgentOutcome, Episode, FeatureGrade, Grade
from verl_opsd.tokens.store import EpisodeStore


def test_two_gold_patches_are_a_split(tmp_path, capsys):
    task = POCKET_DIR / "pocket_textkit_task" / "task0"
    prepare(task)
    gold = [(task / f"feature{f}" / "feature.patch").read_text() for f in (1, 2)]
    contract = EvalContract()
    agents = tuple(AgentOutcome(f"agent{i}", i, "Submitted", 3, p, 0, True) for i, p in enumerate(gold, 1))
    grade = Grade(
        "clean",
        "naive",
        {"agent1": "applied", "agent2": "applied"},
        (FeatureGrade(1, True, 1, 0, 0), FeatureGrade(2, True, 1, 0, 0)),
    )
    fields = {"repo": "pocket_textkit_task", "task_id": 0, "features": (1, 2), "split": "eval", "contract_hash": contract.hash}
    e = Episode("e", outcome="scored", turns=(), agents=agents, grade=grade, brief_kinds={}, model_version=0, **fields)
    EpisodeStore(tmp_path / "run" / "episodes").write(e)
    write_json(tmp_path / "run" / "contract.json", contract.as_dict())
    assert main(["standings", str(tmp_path / "run"), "--grade-alone", "pocket"]) == 0
    assert "1 split" in capsys.readouterr().out
    stored = json.loads((tmp_path / "run" / "alone" / "e.json").read_text())
    assert stored == {"agent1": {"1": True, "2": False}, "agent2": {"1": False, "2": True}}
