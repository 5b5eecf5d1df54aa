"""``opsd probe --fp8``: the error of an FP8 teacher beside the brief's signal, on a run's states, and the launch check that reads it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from opsd_section import SECTION
from probe_run import make_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_opsd.cli.main import main
from verl_opsd.config import OpsdConfig
from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import ensure_tiny, make_tiny_hybrid
from verl_opsd.paths import cache_dir
from verl_opsd.privilege import ChatMarkers
from verl_opsd.probe.states import BriefChoice, context_ids, read_branches, view_of
from verl_opsd.rundir import RunDir
from verl_opsd.teachers import fp8
from verl_opsd.teachers.cache import model_digest
from verl_opsd.tokens.branches import loss_positions
from verl_opsd.tokens.store import corpus_digest
from verl_opsd.verl_adapter.teacher_checks import check_fp8


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, fp8.Measurement]:
    folder = tmp_path_factory.mktemp("fp8")
    model = make_tiny_hybrid(folder / "model", seed=1)
    run = make_run(folder / "run", model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "SMALLEST", 32)
        main(["probe", str(run), "--fp8", "--arms", "brief", "--placements", "system", "--teacher", str(model)])
    return run, model, fp8.read(run / "probe" / "fp8.json")


def test_the_signal_is_the_briefs_effect(probed: tuple[Path, Path, fp8.Measurement]) -> None:
    """By plain forwards in float64 of the model's own code."""
    run, path, found = probed
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    markers, values = ChatMarkers.from_tokenizer(tokenizer), []
    for b in read_branches(RunDir(run), "pocket", tokenizer):
        choice = BriefChoice("peer_spec")
        view = view_of(b, context_ids(b, "brief", choice, tokenizer), "system", choice, markers)
        own = torch.from_numpy(b.trajectory.input_ids.astype("int64"))
        with torch.no_grad():
            bare = model(own[None]).logits[0, loss_positions(b.trajectory.loss_mask)].log_softmax(-1)
            briefed = model(torch.from_numpy(view.ids.astype("int64"))[None]).logits[0, view.position].log_softmax(-1)
        values.append((bare.exp() * (bare - briefed)).sum(-1))
    want = torch.cat(values)
    assert found.positions == len(want)
    assert found.signal["mean"] == pytest.approx(float(want.mean()), rel=1e-3)
    assert found.signal["median"] == pytest.approx(float(want.quantile(0.5)), rel=1e-2)
    assert found.signal["max"] == pytest.approx(float(want.max()), rel=1e-3)


def test_the_error_is_there_and_named(probed: tuple[Path, Path, fp8.Measurement]) -> None:
    _, path, found = probed
    assert 0 < found.error["median"] <= found.error["p90"] <= found.error["p99"] <= found.error["max"]
    assert (found.path, found.brief, found.views, found.dtype) == (str(path), "peer_spec", "system", "float32")
    assert found.tasks == "pocket pocket_train"


def test_a_teacher_is_named_by_its_content(probed: tuple[Path, Path, fp8.Measurement], tmp_path: Path) -> None:
    """The folder may move; a weight, a template or a setting may not change."""
    _, path, found = probed
    moved = Path(shutil.copytree(path, tmp_path / "moved"))
    assert model_digest(str(moved)) == found.teacher == model_digest(str(path))
    for name in ("model.safetensors", "config.json", "chat_template.jinja"):
        one = Path(shutil.copytree(path, tmp_path / name))
        data = bytearray((one / name).read_bytes())
        data[-2] ^= 1
        (one / name).write_bytes(data)
        assert model_digest(str(one)) != found.teacher
    with pytest.raises(OpsdError, match="content of its files"):
        model_digest("no-such/model")


def test_a_corpus_is_named_by_its_episodes(probed: tuple[Path, Path, fp8.Measurement], tmp_path: Path) -> None:
    run, _, found = probed
    assert corpus_digest(run / "episodes") == found.corpus
    fewer = Path(shutil.copytree(run / "episodes", tmp_path / "fewer"))
    shutil.rmtree(next(p for p in fewer.iterdir() if p.is_dir()))
    assert corpus_digest(fewer) != found.corpus
    with pytest.raises(OpsdError, match="holds no episodes"):
        corpus_digest(tmp_path / "nothing")


def opsd(scale: str = "local") -> OpsdConfig:
    return OpsdConfig.parse(SECTION | {"scale": scale})


def test_the_launch_wants_a_measurement_that_stands_and_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = dict.fromkeys((*fp8.STATISTICS, "max"), 1e-4)
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir(), other.mkdir()
    (model / "config.json").write_text("{}"), (other / "config.json").write_text("{ }")
    run = fp8.Measured(model_digest(str(model)), "bfloat16", "peer_spec", "system", "pocket pocket_train", "c")
    good = fp8.Measurement(*dataclasses.astuple(run), str(model), 100, error, {k: 10 * v for k, v in error.items()})
    weak = dataclasses.replace(good, signal=error)
    good.write(tmp_path / "good.json")
    weak.write(tmp_path / "weak.json")
    with pytest.raises(OpsdError, match="10 times above"):
        check_fp8(opsd(), str(model), str(tmp_path / "weak.json"))
    with pytest.raises(OpsdError, match="--fp8"):
        check_fp8(opsd(), str(model), str(tmp_path / "absent.json"))
    with pytest.raises(OpsdError, match=f"teacher {good.teacher} .*{other}"):
        check_fp8(opsd(), str(other), str(tmp_path / "good.json"))
    with pytest.raises(OpsdError, match="tasks pocket pocket_train, the run has pocket pocket_eval"):
        check_fp8(
            dataclasses.replace(opsd(), tasks=dataclasses.replace(opsd().tasks, train="pocket_eval")),
            str(model),
            str(tmp_path / "good.json"),
        )
    corpus = dataclasses.replace(opsd(), corpus=str(make_run(tmp_path / "run", ensure_tiny(cache_dir() / "models"))))
    with pytest.raises(OpsdError, match=f"corpus c, the run has {corpus_digest(tmp_path / 'run' / 'episodes')}"):
        check_fp8(corpus, str(model), str(tmp_path / "good.json"))
    with pytest.raises(OpsdError, match="no CUDA device"):
        check_fp8(opsd(), str(model), str(tmp_path / "good.json"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(OpsdError, match=r"capability 8\.0"):
        check_fp8(opsd("gpu2"), str(model), str(tmp_path / "good.json"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_fp8(opsd("gpu2"), str(model), str(tmp_path / "good.json"))
