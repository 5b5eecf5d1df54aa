"""The server's methods as verl calls them, in this process: options, defaults, gate, memory."""

from __future__ import annotations

import asyncio

import pytest

from verl_opsd.errors import OpsdError

ROLLOUT = "actor_rollout_ref.rollout"
OPSD = f"+{ROLLOUT}.engine_kwargs.opsd"
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def serve(model_path, compose_config):
    from verl_opsd.verl_adapter.rollout.server import EmbeddedServer

    servers = []

    def build(*overrides: str) -> EmbeddedServer:
        config = compose_config(model_path, "opsd_embedded", *overrides).actor_rollout_ref
        servers.append(EmbeddedServer(config.rollout, config.model, 0))
        return servers[-1]

    yield build
    for s in servers:
        s._engine.close()


def generate(server, prompt=PROMPT, session=None, turn=None, **params):
    return server.generate(prompt, {"temperature": 1.0, **params}, f"r{id(object())}", session=session, turn=turn)


def test_without_a_limit_the_reply_gets_verls_default(serve):
    server = serve(f"{ROLLOUT}.prompt_length=64", f"{ROLLOUT}.response_length=20", f"{ROLLOUT}.max_model_len=90")

    async def lengths() -> list[int]:
        return [
            len((await generate(server, list(range(5, 5 + n)), ignore_eos=True)).token_ids)
            for n in (10, 70, 80)  # response length; prompt + response budget; the same
        ]

    assert asyncio.run(lengths()) == [20, 14, 4]
    with pytest.raises(OpsdError, match="max_tokens=0"):
        asyncio.run(generate(server, list(range(5, 89))))
    with pytest.raises(OpsdError, match="fits into the model's 90 tokens"):
        asyncio.run(generate(server, list(range(5, 85)), max_tokens=11))


def test_turns_are_counted_when_the_caller_does_not(serve):
    server = serve()

    async def play() -> list[list[int]]:
        replies = [await generate(server, session="s", turn=t, max_tokens=8) for t in (0, 1)]
        replies += [await generate(server, session="t", max_tokens=8) for _ in range(2)]
        replies += [await generate(server, session="t", turn=t, max_tokens=8) for t in (0, 1)]
        return [r.token_ids for r in replies]

    s0, s1, *t = asyncio.run(play())
    assert s0 != s1 and t[:2] == t[2:]


def test_logprobs_only_when_asked(serve):
    server = serve()
    with_, without = (asyncio.run(generate(server, session="s", turn=0, max_tokens=3, **kw)) for kw in ({"logprobs": True}, {}))
    assert with_.token_ids == without.token_ids and len(with_.log_probs) == 3 and without.log_probs is None


def test_sleep_gives_memory_back_and_caches_are_rebuilt(serve):
    server = serve()

    async def play() -> None:
        await generate(server, session="s", max_tokens=4)
        assert (await server.counters())["kv_bytes"] > 0
        await server.sleep()
        assert (await server.counters())["kv_bytes"] == 0
        await server.wake_up(tags=["kv_cache"])
        again = await generate(server, session="s", max_tokens=4)
        assert again.extra_fields["num_cached_tokens"] == 0

    asyncio.run(play())


def test_closed_gate_holds_or_rejects_until_resumed(serve):
    server = serve()

    async def play() -> None:
        running = asyncio.create_task(generate(server, max_tokens=1500, ignore_eos=True))
        while (await server.counters())["sampled"] == 0:
            await asyncio.sleep(0.01)
        aborted = await server.abort_all_requests()
        assert aborted["aborted_count"] == 1
        partial = await running
        assert partial.stop_reason == "aborted" and 0 < len(partial.token_ids) < 1500

        parked = asyncio.create_task(generate(server, max_tokens=3))
        await asyncio.sleep(0.05)
        assert not parked.done()
        await server.abort_all_requests(reject_request=True)
        assert (await parked).stop_reason == "aborted"
        assert (await generate(server, max_tokens=3)).token_ids == []

        await server.abort_all_requests()
        parked = asyncio.create_task(generate(server, max_tokens=3, ignore_eos=True))
        await asyncio.sleep(0.05)
        assert not parked.done()
        await server.resume_generation()
        assert len((await parked).token_ids) == 3

    asyncio.run(play())


def test_images_are_refused(serve):
    with pytest.raises(OpsdError, match="images"):
        asyncio.run(serve().generate(PROMPT, {}, "r", image_data=[object()]))


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (f"{OPSD}.kv_cash_bytes=5", "kv_cash_bytes"),
        (f"{ROLLOUT}.tensor_model_parallel_size=2", "parallel sizes"),
        (f"{ROLLOUT}.dtype=float16", "rollout.dtype=float16"),
        (f"{ROLLOUT}.max_model_len=20000", "16384 positions"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(serve, override, text):
    with pytest.raises(OpsdError, match=text):
        serve(override)


def test_options_reach_the_engine(serve):
    server = serve(
        f"{OPSD}.kv_cache_bytes=12345678", f"{OPSD}.prefill_chunk=33", f"{ROLLOUT}.seed=5", f"{ROLLOUT}.dtype=bfloat16"
    )
    core = server._core
    assert (core.store.budget_bytes, core.prefill_chunk, core.seed) == (12345678, 33, 5)
    assert str(core.model.dtype) == str(core.store.shape.dtype) == "torch.bfloat16"
    assert core.eos_ids == {2}
