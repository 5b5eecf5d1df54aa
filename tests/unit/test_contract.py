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
    "dataset_hash": "x",
    "schema": 2,
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


def test_same_contract_passes_and_round_trips():
    a = EvalContract(step_limit=7)
    b = EvalContract.from_dict(a.as_dict())
    a.require_same(b, "corpus")
    assert (b.hash, b.step_limit, b.diff(a)) == (a.hash, 7, {})


def test_unlimited_steps_are_refused():
    with pytest.raises(OpsdError, match="step_limit=0"):
        EvalContract(step_limit=0)


def test_unknown_field_is_refused():
    with pytest.raises(OpsdError, match="stepz"):
        EvalContract.from_dict({"stepz": 1})
