"""Optimizers that verl would build late and in vain, and keys of one that it would not read, are refused at launch."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.keys import warm_start_keys
from verl_opsd.verl_adapter.optimizer import check_optimizer


def section(**changes: Any) -> Any:
    return OmegaConf.create({**warm_start_keys()["optim"], **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"override_optimizer_config": {"eps": 1e-6}},
        {"optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}},
        {"optimizer": "Adafactor"},
        {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1, "num_cycles": 1.5, "zero_indexed_step": False},
        {"lr_warmup_steps": 5},
        {"lr_warmup_steps_ratio": 0.1},
        {"min_lr_ratio": None},
        {"betas": [0.8, 0.9], "optimizer": "NAdam"},
    ],
)
def test_what_verl_can_build_passes(changes):
    check_optimizer(section(**changes), "optim")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"optimizer": "Foo"}, "optim.optimizer_impl=torch.optim optim.optimizer=Foo: AttributeError"),
        ({"optimizer_impl": "no.such.module"}, "optim.optimizer_impl=no.such.module optim.optimizer=AdamW: ImportError"),
        ({"optimizer": "lr_scheduler"}, "optim.optimizer=lr_scheduler: TypeError"),  # a module
        ({"optimizer": "Optimizer"}, "optim.optimizer=Optimizer: TypeError"),
        ({"optimizer": "dict", "optimizer_impl": "builtins"}, "optim.optimizer=dict: TypeError"),
        ({"optimizer": "LBFGS"}, "optim.optimizer=LBFGS: TypeError"),  # its step needs a closure
        ({"optimizer": "SparseAdam"}, "optim.optimizer=SparseAdam: "),
        ({"optimizer": "Muon"}, "optim.optimizer=Muon: "),  # vectors
        ({"optimizer": None}, "optim.optimizer=None: "),
        ({"optimizer": 3}, "optim.optimizer=3: "),
        ({"override_optimizer_config": {"epsilon": 1e-6}}, "override_optimizer_config={'epsilon': 1e-06}: TypeError"),
        ({"override_optimizer_config": {"eps": -1.0}}, "ValueError"),
        ({"override_optimizer_config": "eps=1"}, "optim.override_optimizer_config=eps=1"),
        ({"override_optimizer_config": {"lr": 1.0}}, "override_optimizer_config.lr=1.0 with optim.lr=0.001"),
        ({"override_optimizer_config": {"betas": [0, 0]}}, "override_optimizer_config.betas"),
        ({"min_lr_ratio": 0.1}, "optim.min_lr_ratio=0.1 with optim.lr_scheduler_type=constant"),
        ({"num_cycles": 1}, "optim.num_cycles=1 with"),
        ({"zero_indexed_step": False}, "optim.zero_indexed_step=False with"),
        ({"lr_warmup_steps": 5, "lr_warmup_steps_ratio": 0.1}, "optim.lr_warmup_steps=5 with optim.lr_warmup_steps_ratio=0.1"),
        ({"optimizer": "SGD", "betas": [0.8, 0.9]}, r"optim.betas=\[0.8, 0.9\] with"),
    ],
)
def test_what_it_can_not_is_refused_with_a_way_out(changes, what):
    with pytest.raises(OpsdError, match=what) as error:
        check_optimizer(section(**changes), "optim")
    assert error.value.way_out
