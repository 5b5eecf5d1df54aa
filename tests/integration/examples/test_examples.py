"""Every example runs: alone on toy values, and all of them together in one run of verl's trainer."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from verl_opsd.cli.main import main
from verl_opsd.distill.head import HeadTask, LossPositionHead
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal
from verl_opsd.privilege import make_brief

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
MODULES = ("own_brief", "own_loss", "own_weight", "own_worker")


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def head_of(vocab: int, hidden: int) -> LossPositionHead:
    head = nn.Linear(hidden, vocab, bias=False, dtype=torch.float64)
    head.__class__ = LossPositionHead
    return head  # type: ignore[return-value]


def through_head(spec: LossSpec) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Loss, gradient to the hidden states, and the teacher's logits, of five random positions."""
    torch.manual_seed(3)
    head = head_of(vocab=11, hidden=6)
    hidden, teacher = torch.randn(1, 5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    hidden.requires_grad_(True)
    head.task = HeadTask(
        "loss",
        torch.arange(5),
        labels_N=torch.arange(5),
        teacher=Signal(hidden_NH=teacher, head_id="student"),
        coef_N=torch.ones(5),
        loss=spec,
        chunk=2,
    )
    loss = head(hidden).sum()
    (gradient,) = torch.autograd.grad(loss, hidden)
    return loss.item(), gradient[0], teacher @ head.weight.detach().T


def plain(student: torch.Tensor, teacher: torch.Tensor, weighted: bool, name: str) -> torch.Tensor:
    """The same losses in the most obvious torch."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    reverse = (p * (p.log() - q.log())).sum(-1)
    if name == "jeffreys":
        return (reverse + (q * (q.log() - p.log())).sum(-1)).sum()
    weight = (-(p * p.log()).sum(-1) / 1.5).clamp(max=1.0).detach() if weighted else 1.0
    return (weight * reverse).sum()


@pytest.mark.parametrize("case", ["own_loss", "own_weight"])
def test_through_the_head_equals_plain_torch(case: str) -> None:
    module = importlib.import_module(case)
    own_loss = case == "own_loss"
    spec = LossSpec(divergence="jeffreys") if own_loss else LossSpec(weights=(module.EntropyWeight(scale=1.5),))
    loss, gradient, teacher = through_head(spec)
    torch.manual_seed(3)
    head = head_of(vocab=11, hidden=6)
    hidden = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    expected = plain(hidden @ head.weight.T, teacher, not own_loss, "jeffreys" if own_loss else "reverse_kl")
    (expected_gradient,) = torch.autograd.grad(expected, hidden)
    assert loss == pytest.approx(expected.item(), rel=1e-6) and loss > 0.1
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("module", ["own_loss", "own_weight"])
def test_examples_in_the_docstrings(module: str) -> None:
    outcome = doctest.testmod(importlib.import_module(module))
    assert outcome.attempted >= 3 and outcome.failed == 0


def test_own_brief_joins_a_registered_one() -> None:
    module = importlib.import_module("own_brief")
    brief = make_brief("peer_spec+house_rules", "agent1", {"agent2": "Add a --quiet flag."})
    assert brief.kind == "guidance" and brief.text.endswith(module.RULES) and "Add a --quiet flag." in brief.text


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda p: p.stem)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.e2e
@pytest.mark.slow
def test_all_examples_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The modules are loaded in every process: a brief in the agent-loop worker, a divergence in the training worker, a
    worker class in its Ray actor, a trainer in verl's task runner."""
    run = tmp_path / "run"
    command = [
        *(str(ROOT / "recipes" / "opd" / "run.sh"), f"hydra.run.dir={run}"),
        *("opsd.brief.name=peer_spec+house_rules", "opsd.loss.divergence=jeffreys", "trainer.v1.trainer_mode=counting"),
        *("trainer.total_training_steps=1", "opsd.tasks.max_eval=1"),
    ]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH", "")])),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "VERL_USE_EXTERNAL_MODULES": ",".join(MODULES),
    }
    log = tmp_path / "log.txt"
    with log.open("w") as out:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=600)
    assert done.returncode == 0, log.read_text()[-6000:]
    report = json.loads((run / "report.json").read_text())
    assert report["brief"]["name"] == "peer_spec+house_rules" and report["loss_spec"]["divergence"] == "jeffreys"
    seen = [
        gate for gate in map(json.loads, (run / "evidence.jsonl").read_text().splitlines()) if gate["gate"] == "tokens_seen"
    ]
    assert len(seen) == 1 and seen[0]["value"] > report["distillation"]["loss_positions"] > 0
    assert main(["report", str(run)]) == 0 and "KL by quarter" in capsys.readouterr().out


def test_doctor_finds_nothing_missing(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    assert code == 0, capsys.readouterr().out
