"""What an endpoint's manifest and address may not be: told before a pair is run."""

import asyncio

import httpx
import pytest
import yaml

from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.endpoint import warm_up
from verl_opsd.evaluation.manifest import read_manifest

CONTRACT = EvalContract()
GOOD = {
    "engine": "vllm 0.11",
    "layout": "tp=1",
    "dtype": "bf16",
    "tool_parser": CONTRACT.tool_parser,
    "reasoning_parser": CONTRACT.reasoning_parser,
    "context_length": CONTRACT.context_length,
    "max_num_seqs": 2 * CONTRACT.concurrency,
}


def test_a_whole_manifest(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump(GOOD | {"prices": [0.1, 2], "parameters": None}))
    assert read_manifest(path, CONTRACT).prices == (0.1, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"context_length": "long"},
        {"context_length": None},
        {"max_num_seqs": 1e9},
        {"max_num_seqs": True},
        {"parameters": -1},
        {"prices": 3},
        {"prices": [1]},
        {"prices": [1, float("nan")]},
        {"prices": [1, -2]},
        {"engine": 3},
        {"layout": ["tp=1"]},
    ],
)
def test_values_that_cannot_be_one_are_named(tmp_path, change):
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump(GOOD | change))
    with pytest.raises(OpsdError, match=f"{next(iter(change))}="):
        read_manifest(path, CONTRACT)


def asked(base, transport=None):
    async def run():
        async with httpx.AsyncClient(base_url=base, transport=transport, trust_env=False) as client:
            await warm_up(client, "M", CONTRACT)

    asyncio.run(run())


@pytest.mark.parametrize("base", ["http://127.0.0.1:9/v1/", "nonsense/"])
def test_an_address_that_nothing_answers_at_is_named(base):
    with pytest.raises(OpsdError, match="a server that answers"):
        asked(base)


@pytest.mark.parametrize("body", ["<html>", "[]", "{}", '{"data": [3]}'])
def test_a_list_of_models_that_is_none_is_shown(body):
    with pytest.raises(OpsdError, match="lists its models as"):
        asked("http://host/v1/", httpx.MockTransport(lambda request: httpx.Response(200, text=body)))
