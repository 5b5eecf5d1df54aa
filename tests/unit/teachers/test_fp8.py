"""FP8: the rounding of one entry, a layer's product, a whole teacher, and the rule that refuses it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import make_tiny, make_tiny_hybrid
from verl_opsd.teachers import fp8
from verl_opsd.teachers.base import Pass
from verl_opsd.teachers.device import DeviceTeacher


def test_entries_are_within_half_a_step_of_e4m3() -> None:
    x = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 7)[:, None]
    value, scale = fp8.quantize(x)
    assert value.dtype == torch.float8_e4m3fn and tuple(scale.shape) == (7, 1)
    assert torch.equal(value.float().abs().amax(-1), torch.full((7,), 448.0))
    back = value.float() * scale
    # 3 mantissa bits: half a step is 1/16 of an entry; below 2^-6 of the format steps are 2^-9.
    assert bool(((back - x).abs() <= x.abs() / 16 + scale * 2**-10).all())
    zero, _ = fp8.quantize(torch.zeros(1, 4))
    assert torch.equal(zero.float(), torch.zeros(1, 4))


def test_product_has_a_scale_for_each_token_and_channel() -> None:
    """Rows and channels of very different size come out with the same relative error."""
    torch.manual_seed(0)
    linear = nn.Linear(512, 64, bias=False)
    linear.weight.data *= torch.logspace(-3, 3, 64)[:, None]
    x = torch.randn(2, 5, 512) * torch.logspace(-4, 4, 5)[:, None]
    want = linear(x)
    got = fp8.Fp8Linear(linear)(x)
    relative = (got - want).square().mean((0, 2)).sqrt() / want.square().mean((0, 2)).sqrt()
    assert got.shape == want.shape and bool((relative < 0.06).all())


def test_a_converted_teacher_is_near_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "SMALLEST", 32)
    path = make_tiny_hybrid(tmp_path / "teacher", seed=3)
    exact = DeviceTeacher(str(path), torch.float32, "cpu", "t")
    rounded = DeviceTeacher(str(path), torch.float32, "cpu", "t")
    # Three of the MLP in each layer; qkv, z and out in three of them, q, k, v and o in the fourth.
    assert fp8.convert(rounded._model) == 4 * 3 + 3 * 3 + 4
    ids = torch.arange(40) % 50
    passes = [Pass(0, torch.arange(40), ids, torch.arange(40))]
    a, b = (t.score(passes).hidden_NH for t in (exact, rounded))
    assert a is not None and b is not None
    assert max(fp8.error(a, a, exact.weight_VH, chunk=16).values()) == 0.0
    assert 0 < float((a - b).norm() / a.norm()) < 0.6
    measured = fp8.error(a, b, exact.weight_VH, chunk=16)
    assert 0 < measured["median"] <= measured["p90"] <= measured["p99"] <= measured["max"]


def test_what_several_products_read_is_rounded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each layer the MLP's input and what its last product reads, and as many of the attention or the delta rule; the numbers are those of
    products that each round their own."""
    monkeypatch.setattr(fp8, "SMALLEST", 32)
    path = str(make_tiny_hybrid(tmp_path / "teacher", seed=3))
    together, apart = (DeviceTeacher(path, torch.float32, "cpu", "t", fp8=True) for _ in range(2))
    for m in apart._model.modules():
        if isinstance(m, fp8.Fp8Linear):
            m.shared = fp8.Input(1)
        if isinstance(m, fp8.Fp8MLP):
            m.__class__ = qwen3_5.Qwen3_5MLP
    calls = []
    monkeypatch.setattr(fp8, "quantize", lambda x, true=fp8.quantize: calls.append(len(x)) or true(x))
    a = together.probe()
    assert calls == [29] * 4 * 4
    calls.clear()
    assert torch.equal(a, apart.probe()) and len(calls) == 25
    inputs = {id(m.shared): m.shared for m in together._model.modules() if isinstance(m, fp8.Fp8Linear)}.values()
    assert all(i._x is None and i._found is None for i in inputs)  # nothing is held behind a forward


def test_a_shared_input_is_known_by_itself() -> None:
    """An equal tensor is another input, and one that was given up in the middle is not taken for the next."""
    shared, x = fp8.Input(2), torch.ones(1, 4)
    first = shared.rounded(x)
    assert shared.rounded(x) is first and shared.rounded(x) is not first
    other = shared.rounded(2 * x)
    assert torch.equal(other[1], 2 * first[1])


def test_error_is_the_divergence_by_hand() -> None:
    weight = torch.tensor([[1.0], [0.0]])
    exact, rounded = torch.zeros(4, 1), torch.full((4, 1), math.log(3.0))  # (1/2, 1/2) against (3/4, 1/4)
    want = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    for value in fp8.error(exact, rounded, weight).values():
        assert value == pytest.approx(want, rel=1e-5)


def test_only_a_frozen_hybrid_is_converted(tmp_path: Path) -> None:
    plain = DeviceTeacher(str(make_tiny(tmp_path / "plain")), torch.float32, "cpu", "t")
    with pytest.raises(OpsdError, match="keep bf16"):
        fp8.convert(plain._model)


def test_a_signal_near_the_error_is_refused() -> None:
    measured = {"mean": 1e-3, "median": 1e-4, "p90": 2e-3, "p99": 1e-2, "max": 0.1}
    fp8.require(measured, {k: 10.0 * v for k, v in measured.items()})
    weak = {k: 20.0 * v for k, v in measured.items()} | {"median": 9.0e-4}
    with pytest.raises(OpsdError, match=r"median: 0.0009 against 0.0001\n.*10 times above"):
        fp8.require(measured, weak)
    with pytest.raises(OpsdError, match="mean"):
        fp8.require(measured, weak | {"mean": math.nan})


ERROR = {"mean": 1e-3, "median": 1e-4, "p90": 2e-3, "p99": 1e-2, "max": 0.1}
RUN = fp8.Measured("a1", "bfloat16", "peer_spec", "system", "pocket pocket_train", "c1")
FOUND = fp8.Measurement(*dataclasses.astuple(RUN), "/m/big", 100, ERROR, {k: 11 * v for k, v in ERROR.items()})
OTHERS = {
    "teacher": "a2",
    "dtype": "float32",
    "brief": "process",
    "views": "last_user, user turn block",
    "tasks": "pocket pocket_eval",
    "corpus": "c2",
}


def test_a_measurement_survives_its_file_and_is_held_against_the_run(tmp_path: Path) -> None:
    FOUND.write(tmp_path / "fp8.json")
    assert fp8.read(tmp_path / "fp8.json") == FOUND
    fp8.require_measured(FOUND, RUN, "/elsewhere/big")
    assert set(OTHERS) == {f.name for f in dataclasses.fields(fp8.Measured)}
    for name, other in OTHERS.items():
        for found, run in (
            (FOUND, dataclasses.replace(RUN, **{name: other})),
            (dataclasses.replace(FOUND, **{name: other}), RUN),
        ):
            with pytest.raises(OpsdError, match="measure it") as caught:
                fp8.require_measured(found, run, "/elsewhere/big")
            what = caught.value.what
            assert f" {name} {getattr(found, name)}" in what and getattr(run, name) in what
            assert [n for n in OTHERS if f" {n} " in what] == [name] and ("/m/big" in what) == (name == "teacher")
    online = dataclasses.replace(RUN, corpus=None)
    fp8.require_measured(dataclasses.replace(FOUND, corpus="c2"), online, "/m/big")  # it has yet to play its episodes
    for few in (0, 1, 99):
        with pytest.raises(OpsdError, match=f" {few} positions"):
            fp8.require_measured(dataclasses.replace(FOUND, positions=few), RUN, "/m/big")
    for nothing in (
        FOUND,
        dataclasses.replace(FOUND, signal=dict.fromkeys(ERROR, 0.0)),
    ):  # of a model that was not rounded at all
        with pytest.raises(OpsdError, match="without any error"):
            fp8.require_measured(dataclasses.replace(nothing, error=dict.fromkeys(ERROR, 0.0)), RUN, "/m/big")
    weak = dataclasses.replace(FOUND, signal={k: 9 * v for k, v in ERROR.items()})
    with pytest.raises(OpsdError, match="10 times above"):
        fp8.require_measured(weak, RUN, "/m/big")


def test_views_are_named_by_what_decides_their_ids() -> None:
    ways = [
        ("system", "block", None, None),
        ("last_user", "block", None, None),
        ("last_user", "message", None, None),
        ("system", "block", 4096, 512),
        ("system", "block", 4096, 256),
        ("system", "block", 2048, 256),
    ]
    assert len({fp8.views_of(*way) for way in ways}) == len(ways)
    assert fp8.views_of("system", "block", None, None) == fp8.views_of("system", "message", 8192, None)  # neither is read


@pytest.mark.parametrize(
    "text",
    [None, "", "[]", "{}", json.dumps(dataclasses.asdict(FOUND) | {"error": {"mean": 1.0}}), json.dumps({"teacher": "x"})]
    + [json.dumps(dataclasses.asdict(FOUND) | {"signal": dict.fromkeys(ERROR, odd)}) for odd in (math.inf, math.nan, -1.0)]
    + [
        json.dumps(dataclasses.asdict(FOUND) | odd)
        for odd in ({"positions": True}, {"positions": 4.5}, {"corpus": None}, {"teacher": 3})
    ],
)
def test_a_file_that_is_no_measurement_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "fp8.json").write_text(text)
    with pytest.raises(OpsdError, match=r"opsd probe RUN --teacher MODEL --fp8"):
        fp8.read(tmp_path / "fp8.json")


def test_a_device_without_fp8_products_is_refused() -> None:
    fp8.require_device((8, 9))
    fp8.require_device((9, 0))
    fp8.require_device((12, 0))
    for capability, named in ((None, "no CUDA device"), ((8, 6), "capability 8.6"), ((7, 5), "capability 7.5")):
        with pytest.raises(OpsdError, match=named):
            fp8.require_device(capability)


def test_a_device_teacher_is_built_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "SMALLEST", 32)
    path = str(make_tiny_hybrid(tmp_path / "teacher", seed=3))
    asked, later = DeviceTeacher(path, torch.float32, "cpu", "t", fp8=True), DeviceTeacher(path, torch.float32, "cpu", "t")
    assert later.to_fp8() == 25 and sum(isinstance(m, fp8.Fp8Linear) for m in asked._model.modules()) == 25
    assert torch.equal(asked.probe(), later.probe())
