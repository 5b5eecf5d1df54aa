"""The contract's hash covers every field, and two contracts are never mixed."""

import dataclasses
import hashlib
import json

import pytest

from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError

OTHER = {
    "step_limit": 100,
    "command_timeout_s": 10.0,
    "wall_limit_s": 10.0,
    "max_tokens": 1,
    "context_length": 131072,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 20,
    "compaction": True,
    "compaction_trigger": 1,
    "thinking": "strip",
    "tool_parser": "x",
    "concurrency": 8,
    "messaging": False,
    "git": False,
    "sandbox": "docker",
    "grader": "x",
    "harness": "x",
    "templates_hash": "x",
    "tokenizer_hash": "x",
    "dataset_hash": "x",
    "subset_hash": "x",
    "serving": "x",
    "sandbox_traits": "x",
    "cost_limit": 3.0,
    "reasoning_parser": "x",
    "grade_timeout_s": 10.0,
    "schema": 1,
}


def test_every_field_changes_the_hash():
    base = EvalContract()
    assert {f.name for f in dataclasses.fields(base)} == set(OTHER)
    hashes = {dataclasses.replace(base, **{k: v}).hash for k, v in OTHER.items()}
    assert len(hashes | {base.hash}) == len(OTHER) + 1


def test_hash_is_sha256_of_sorted_json():
    c = EvalContract()
    text = json.dumps({k: c.as_dict()[k] for k in sorted(c.as_dict())}, separators=(",", ":"))
    assert c.hash == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("name", sorted(OTHER))
def test_mixing_names_the_field(name):
    a, b = EvalContract(), dataclasses.replace(EvalContract(), **{name: OTHER[name]})
    with pytest.raises(OpsdError, match=rf"corpus.*{name}"):
        a.require_same(b, "corpus")


@pytest.mark.parametrize("name", sorted(OTHER))
def test_a_comparison_varies_the_field_that_it_declares_and_no_other(name):
    a, b = EvalContract(), dataclasses.replace(EvalContract(), **{name: OTHER[name]})
    a.require_same(b, "run", varies=name)
    a.require_same(b, "run", without=(name,))
    more = "step_limit" if name != "step_limit" else "top_k"
    with pytest.raises(OpsdError, match=rf"(?s)\({more}: .*only {name} was declared"):
        a.require_same(dataclasses.replace(b, **{more: OTHER[more]}), "run", varies=name)


def test_only_a_field_can_be_declared():
    with pytest.raises(OpsdError, match="varies 'steps'"):
        EvalContract().require_same(EvalContract(), "run", varies="steps")


@pytest.mark.parametrize("name", sorted(OTHER))
def test_a_field_that_was_not_recorded_is_not_a_default(name):
    values = EvalContract().as_dict()
    del values[name]
    with pytest.raises(OpsdError, match=rf"without \['{name}'\]"):
        EvalContract.from_dict(values)


def test_same_contract_passes_and_round_trips():
    a = EvalContract(step_limit=7)
    b = EvalContract.from_dict(a.as_dict())
    a.require_same(b, "corpus")
    assert (b.hash, b.step_limit, b.diff(a)) == (a.hash, 7, {})


def test_sampling_from_a_part_of_the_distribution_is_told():
    assert EvalContract().sampling == ""
    told = EvalContract(temperature=0.6, top_p=0.95, top_k=20).sampling
    assert told.startswith(
        "replies are sampled at temperature=0.6 top_p=0.95 top_k=20; divergences are measured at temperature 1"
    )
    assert "temperature=" not in EvalContract(top_p=0.95).sampling


def test_unlimited_steps_are_refused():
    with pytest.raises(OpsdError, match="step_limit=0"):
        EvalContract(step_limit=0)


def test_unknown_field_is_refused():
    with pytest.raises(OpsdError, match="stepz"):
        EvalContract.from_dict({"stepz": 1})


def test_equal_contracts_have_one_hash():
    whole = EvalContract(temperature=1, top_p=1, command_timeout_s=300, cost_limit=0)
    assert whole == EvalContract() and whole.hash == EvalContract().hash


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("wall_limit_s", float("inf")),
        ("cost_limit", float("nan")),
        ("step_limit", 1.5),
        ("step_limit", True),
        ("step_limit", "200"),
        ("top_k", 2.5),
        ("messaging", "false"),
        ("thinking", "kept"),
    ],
)
def test_a_value_of_another_kind_is_refused(name, value):
    with pytest.raises(OpsdError, match=rf"contract\.{name}="):
        EvalContract(**{name: value})
