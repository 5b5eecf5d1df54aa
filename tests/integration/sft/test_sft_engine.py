"""Loss and gradients of a warm start equal cross-entropy by hand: packed, padded, alone, on one rank and on two, hybrid too."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from forked import Forks

HERE = Path(__file__).parent
ENGINE = HERE.parent / "engine"


@pytest.fixture(scope="module", params=[1, 2])
def measured(forks: Forks, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp(f"sft-{request.param}")
    env = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = f"import sys; sys.path[:0] = {[str(HERE), str(ENGINE)]!r}; "
    (made,) = forks.run(
        f"{path}from pathlib import Path; import tiny; tiny.make_models(Path({str(root)!r}))", [], cwd=root, env=env
    )
    assert made.returncode == 0, made.stderr
    argv = [[str(r), str(request.param), str(port), str(root), str(root / "out")] for r in range(request.param)]
    code = f"{path}import runpy; runpy.run_path({str(HERE / 'sft_ranks.py')!r}, run_name='__main__')"
    ranks = forks.run(code, *argv, cwd=root, env=env, timeout_s=500)  # about 60 s on two idle cores
    assert [done.returncode for done in ranks] == [0] * request.param, "\n".join(done.stderr[-3000:] for done in ranks)
    return {"world": request.param, **json.loads((root / "out").read_text())}


def test_loss_and_gradients_equal_cross_entropy_by_hand(measured):
    cases = {k: v for k, v in measured.items() if isinstance(v, dict) and "grad" in v}
    assert len(cases) == 12 + 2 + 4 + 1 + 1 + 1 + 1 + 3
    for name, found in cases.items():
        assert found["loss"] == pytest.approx(found["want"], rel=2e-6), (name, found)
        assert found["grad"] < 1e-4 and found["tensors"] > 10 and found["extra"] == 0, (name, found)


def test_documents_share_a_forward_and_a_hybrids_layers_keep_them_apart(measured):
    for model in ("tied", "hybrid"):
        assert measured[f"{model}-full-shares"] is True and measured[f"{model}-lora-shares"] is True
    for how in ("full", "lora"):
        packed, alone = (measured[f"hybrid-{how}-{k}"] for k in ("packed", "alone"))
        assert packed["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def test_a_turn_whose_mask_is_0_is_context_alone(measured):
    """Against the sum by hand over the other turn, above; the turn left out would have changed it."""
    assert abs(measured["one_turn"]["loss"] - measured["tied-full-alone"]["loss"]) > 1e-3


def test_the_gate_changes_the_loss(measured):
    assert measured["gate"]["loss"] < 0.9 * measured["tied-full-alone"]["loss"]


def test_a_resumed_run_is_anchored_to_the_weights_before_its_checkpoint(measured):
    found = measured["anchor-resumed"]
    assert found["moved"] > 1e-3 and found["loss"] == pytest.approx(found["want"], rel=2e-6), found


def test_validation_loss_is_the_same_number(measured):
    assert measured["validation"]["loss"] == pytest.approx(measured["validation"]["want"], rel=2e-6)


@pytest.mark.parametrize("how", ["full", "lora"])
def test_validation_is_without_the_anchor(measured, how):
    found = measured[f"anchor-{how}"]
    assert found["validation"] == pytest.approx(found["validation_want"], rel=2e-6)
    assert found["want"] > 1.001 * found["validation_want"]


def test_layers_that_would_mix_rows_get_one_row_a_forward(measured):
    """Four rows over the ranks, whatever verl's micro-batches are; that the numbers are those of rows alone is tested above."""
    assert measured["apart"]["forwards"] == 4 // measured["world"]


def test_loss_on_the_first_token_is_refused(measured):
    assert "whose first token has loss" in measured["first"]
