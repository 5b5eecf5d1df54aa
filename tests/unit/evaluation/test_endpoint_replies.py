"""What a server may answer with status 200 that is no reply: an infrastructure fault, never an agent's failure."""

import asyncio

import httpx
import pytest

from verl_opsd.contract import EvalContract
from verl_opsd.errors import InfraFault
from verl_opsd.evaluation.endpoint import EndpointSession

MESSAGE = {"role": "assistant", "content": "hello"}
USAGE = {"prompt_tokens": 7, "completion_tokens": 2}


def ask(content=None, **response):
    answer = httpx.Response(200, content=content, **response)

    async def chat():
        async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer), base_url="http://served/v1") as client:
            session = EndpointSession(client, "m", EvalContract(sandbox="process"), (0.0,))
            return await session.chat([{"role": "user", "content": "x"}])

    return asyncio.run(chat())


@pytest.mark.parametrize(
    "body",
    [
        [],
        None,
        "gateway",
        {},
        {"error": {"message": "overloaded"}},
        {"choices": [], "usage": USAGE},
        {"choices": None, "usage": USAGE},
        {"choices": [{}], "usage": USAGE},
        {"choices": [{"message": None}], "usage": USAGE},
        {"choices": [{"message": "hello"}], "usage": USAGE},
        {"choices": [{"message": MESSAGE}]},
        {"choices": [{"message": MESSAGE}], "usage": None},
        {"choices": [{"message": MESSAGE}], "usage": {"prompt_tokens": 7}},
        {"choices": [{"message": MESSAGE}], "usage": {"prompt_tokens": None, "completion_tokens": 2}},
        {"choices": [{"message": MESSAGE}], "usage": {"prompt_tokens": "many", "completion_tokens": 2}},
    ],
)
def test_json_that_is_no_completion(body):
    with pytest.raises(InfraFault) as fault:
        ask(json=body)
    assert fault.value.kind == "endpoint_bad_reply" and "http://served/v1" in fault.value.what


@pytest.mark.parametrize("content", [b"", b"<html>502 Bad Gateway</html>", b'{"choices": [{"message"', b"\xff\xfe"])
def test_what_is_no_json(content):
    with pytest.raises(InfraFault) as fault:
        ask(content)
    assert fault.value.kind == "endpoint_bad_reply" and "no JSON" in fault.value.what


def test_a_reply_is_taken_as_it_is():
    reply = ask(json={"choices": [{"message": {**MESSAGE, "refusal": None}, "finish_reason": None}], "usage": USAGE})
    assert reply.message == MESSAGE and reply.stop_reason == "stop"
    assert (reply.turn, reply.prompt_tokens, reply.completion_tokens) == (0, 7, 2)
