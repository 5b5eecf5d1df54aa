"""Several teachers, each for some tasks: routes, what the configuration refuses, and rows of a micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from verl_opsd.config import OpsdConfig
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.passes import jagged, teacher_of_rows
from verl_opsd.verl_adapter.routes import check_routes, models_of, teacher_of


def config(teacher: dict[str, Any], loss: dict[str, Any] | None = None) -> OpsdConfig:
    return OpsdConfig.parse(
        {
            "recipe": "opd",
            "scale": "local",
            "mode": "online",
            "tasks": {"dataset": "pocket", "train": "pocket_train", "eval": "pocket_eval"},
            "brief": {"name": "peer_spec"},
            "teacher": teacher,
            "loss": loss or {},
            "contract": {"context_length": 4096, "max_tokens": 96},
        }
    )


def routed(**tasks: list[str]) -> OpsdConfig:
    members = {name: {"kind": "device", "path": f"/models/{name}", "tasks": patterns} for name, patterns in tasks.items()}
    return config({"kind": "routed", "members": members})


def pair(repo: str, task: int, split: str = "train") -> PairTask:
    return PairTask(Path("/d"), repo, task, (1, 2), split)


PAIRS = [pair("click", 1), pair("click", 2), pair("jinja", 7)]


def test_each_task_has_its_teacher() -> None:
    opsd = routed(small=["click/task1"], large=["click/task2", "jinja/*"])
    check_routes(opsd, PAIRS)
    assert list(models_of(opsd)) == ["small", "large"]
    assert [int(teacher_of(opsd, p)["opsd_teacher"][0]) for p in PAIRS] == [0, 1, 1]
    assert teacher_of(opsd, pair("elsewhere", 1, "eval"))["opsd_teacher"].tolist() == [0]


def test_one_teacher_or_the_student_needs_no_route() -> None:
    assert teacher_of(config({}), PAIRS[0]) == {} and models_of(config({"kind": "frozen"})) == {}
    one = config({"kind": "device", "path": "m"})
    assert teacher_of(one, PAIRS[0])["opsd_teacher"].tolist() == [0] and list(models_of(one)) == ["device:m"]
    check_routes(one, PAIRS)


@pytest.mark.parametrize(
    ("tasks", "named"),
    [
        ({"a": ["click/*"]}, r"jinja/task7: None"),
        ({"a": ["click/*", "jinja/*"], "b": ["*/task1"]}, r"click/task1: \['a', 'b'\]"),
        ({"a": ["*"], "b": ["pillow/*"]}, r"without a training task: b: pillow/\*"),
        ({"a": ["*", "click/task9"]}, r"without a training task: a: click/task9"),
    ],
)
def test_routes_are_exact(tasks: dict[str, list[str]], named: str) -> None:
    with pytest.raises(OpsdError, match=named):
        check_routes(routed(**tasks), PAIRS)


@pytest.mark.parametrize(
    ("teacher", "loss", "named"),
    [
        ({"kind": "routed"}, {}, "is made of members"),
        ({"kind": "device", "path": "m", "members": {"a": {"tasks": ["*"], "path": "m"}}}, {}, "is made of members"),
        ({"kind": "routed", "path": "m", "members": {"a": {"tasks": ["*"], "path": "m"}}}, {}, "opsd.teacher.path=m"),
        ({"kind": "routed", "members": {"a": {"tasks": [], "path": "m"}}}, {}, r"members\.a with tasks=\[\]"),
        ({"kind": "routed", "members": {"student": {"tasks": ["*"], "path": "m"}}}, {}, "a name of its own"),
        ({"kind": "routed", "members": {"a": {"tasks": ["*"]}}}, {}, r"without opsd\.teacher\.members\.a\.path"),
        ({"kind": "routed", "members": {"a": {"tasks": ["*"], "kind": "self"}}}, {}, "device, server"),
        ({"kind": "routed", "members": {"a": {"tasks": ["*"], "path": "m", "url": "u"}}}, {}, r"members\.a\.url=u"),
        ({"kind": "device", "path": "m", "devices": 3, "ranks": 2}, {}, "a multiple of ranks"),
        ({"kind": "self", "ranks": 2}, {}, r"opsd\.teacher\.ranks=2"),
        ({"kind": "server", "path": "m"}, {"support": "teacher_topk", "top_k": 3}, r"without opsd\.teacher\.url"),
        ({"kind": "server", "path": "m", "url": "u"}, {}, "set opsd.loss.support=teacher_topk"),
        (
            {"kind": "server", "path": "m", "url": "u"},
            {"support": "union_topk", "top_k": 3},
            "set opsd.loss.support=teacher_topk",
        ),
        ({"kind": "server", "path": "m", "url": "u", "devices": 2}, {"support": "teacher_topk", "top_k": 3}, "devices=2"),
        ({"kind": "device", "path": "m", "requests": 2}, {}, "requests=2"),
    ],
)
def test_contradictions_name_the_key(teacher: dict[str, Any], loss: dict[str, Any], named: str) -> None:
    with pytest.raises(OpsdError, match=named):
        config(teacher, loss)


def test_a_server_with_its_loss_is_taken() -> None:
    server = {"kind": "server", "path": "m", "url": "http://h:1"}
    assert config(server, {"support": "teacher_topk", "top_k": 20}).loss.top_k == 20
    assert config(server, {"divergence": "policy_gradient", "trust": [0.5, 2.0]}).loss.top_k is None


def test_rows_of_a_micro_batch_have_one_teacher() -> None:
    def batch(*numbers: int) -> dict[str, torch.Tensor]:
        return {"opsd_teacher": jagged([torch.tensor([n]) for n in numbers])}

    assert teacher_of_rows(batch(1, 1), [3, 2], 2) == 1
    assert teacher_of_rows(batch(0, 1), [0, 2], 2) == 1  # a row without loss positions says nothing
    assert teacher_of_rows(batch(0), [0], 2) == 0
    assert teacher_of_rows({}, [3], 1) == 0
    for numbers, counts in (((0, 1), [3, 2]), ((2,), [1])):
        with pytest.raises(OpsdError, match="every row names its teacher"):
            teacher_of_rows(batch(*numbers), counts, 2)
    with pytest.raises(OpsdError, match="every row names its teacher"):
        teacher_of_rows({}, [3], 2)
