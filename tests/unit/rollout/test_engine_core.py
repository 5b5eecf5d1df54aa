"""The embedded engine against transformers' stock model: caching, batching, eviction, cropping change only cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.rollout.engine_core import EngineCore, Reply, Request
from verl_opsd.verl_adapter.rollout.kv import BLOCK
from verl_opsd.verl_adapter.rollout.sampling import SamplingParams

ATOL = 1e-5
NO_EOS = {511}


def engine(models, **options) -> EngineCore:
    return EngineCore(models.served, options.pop("eos_ids", NO_EOS), options.pop("max_model_len", 2048), **options)


def ids(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, n).tolist()


def request(name: str, prompt: list[int], n: int = 8, session: str | None = "", turn: int = 0, **kw) -> Request:
    forced = kw.pop("forced", None)
    return Request(
        name,
        np.array(prompt, np.int32),
        SamplingParams(n, **kw),
        name if session == "" else session,
        turn,
        None if forced is None else np.array(forced, np.int32),
    )


def run(core: EngineCore, *requests: Request) -> dict[str, Reply]:
    for r in requests:
        core.submit(r)
    done: dict[str, Reply] = {}
    while core.unfinished:
        for outcome in core.step():
            assert isinstance(outcome, Reply), outcome
            done[outcome.request_id] = outcome
    return done


def budget(models, *tokens: int) -> int:
    """Bytes of caches of so many tokens each: keys, values, and the states of the hybrid's three recurrent layers."""
    if models.kind == "hybrid":
        convolution = (2 * 2 * 16 + 4 * 16) * 4  # channels (queries, keys, values) x kernel
        return sum(t * 2 * 2 * 16 * 4 + 3 * (convolution + 4 * 16 * 16) * 4 for t in tokens)
    layers, heads, size = {"qwen3": (2, 2, 32), "llama": (3, 3, 8)}[models.kind]
    return sum(t * layers * 2 * heads * size * 4 for t in tokens)


def check(models, prompt: list[int], reply: Reply, temperature: float = 1.0) -> None:
    expected = models.reference(prompt, reply.token_ids, temperature).numpy()
    np.testing.assert_allclose(reply.logprobs, expected, atol=ATOL)


def test_the_tolerance_tells_a_lost_or_shifted_token(models):
    """Guards the checks below: one token more, less or other in the past moves the log-probabilities far beyond it."""
    prompt, reply = ids(1, 90), ids(2, 8)
    right = models.reference(prompt, reply)
    for wrong in (prompt[1:], prompt[:40] + prompt[41:], [7, *prompt], [*prompt[:45], 7, *prompt[46:]]):
        assert float((models.reference(wrong, reply) - right).abs().max()) > 100 * ATOL


@pytest.mark.parametrize("chunk", [7, 512])
def test_turns_cost_their_new_tokens_and_equal_one_pass(models, chunk):
    core = engine(models, prefill_chunk=chunk)
    prompt = ids(1, 90)
    for turn, new in enumerate((0, 1, 2, 40, 130)):
        prompt = prompt + ids(10 + turn, new)
        held = core.counters.forwarded
        reply = run(core, request(f"r{turn}", prompt, session="s", turn=turn))[f"r{turn}"]
        check(models, prompt, reply)
        assert reply.cached_tokens == held
        prompt = prompt + reply.token_ids
        # Every token is forwarded exactly once; the last one has nothing after it yet.
        assert core.counters.forwarded == len(prompt) - 1


def test_batched_sessions_equal_each_session_alone(models):
    prompts = {f"s{i}": ids(i, n) for i, n in enumerate((1, 5, 64, 65, 200))}
    together = run(engine(models, prefill_chunk=50), *[request(s, p, n=12) for s, p in prompts.items()])
    for s, p in prompts.items():
        alone = run(engine(models), request(s, p, n=12))[s]
        assert together[s].token_ids == alone.token_ids
        np.testing.assert_allclose(together[s].logprobs, alone.logprobs, atol=ATOL)
        check(models, p, together[s])


def test_sessions_share_forward_passes_when_attention_is_full(flat_models):
    core = engine(flat_models)
    run(core, *[request(f"s{i}", ids(i, 20), n=10) for i in range(6)])
    assert core.counters.forward_passes == 10  # the prompts, then nine decoding steps for all six


def test_a_request_joins_while_others_decode(models):
    core = engine(models)
    first = request("first", ids(0, 10), n=20)
    core.submit(first)
    for _ in range(5):
        assert core.step() == []
    core.submit(request("second", ids(1, 30), n=3))
    order = []
    while core.unfinished:
        order += [r.request_id for r in core.step()]
    assert order == ["second", "first"]


def test_a_long_prompt_does_not_stall_decoding(models):
    core = engine(models, prefill_chunk=16)
    core.submit(request("short", ids(0, 4), n=6))
    core.step()
    core.submit(request("long", ids(1, 400), n=1))
    steps = 0
    while core.running != 1 or steps == 0:
        core.step()
        steps += 1
        assert steps < 10
    assert steps == 5  # the short reply ended while the long prompt was still being read


def test_eviction_changes_cost_only(models):
    def play(core: EngineCore) -> dict[str, Reply]:
        prompts = {s: ids(i, 100) for i, s in enumerate("abcd")}
        out = {}
        for turn in range(3):
            for s in prompts:
                reply = run(core, request(f"{s}{turn}", prompts[s], session=s, turn=turn))[f"{s}{turn}"]
                check(models, prompts[s], reply)
                out[f"{s}{turn}"] = reply
                prompts[s] = prompts[s] + reply.token_ids + ids(turn, 20)
        return out

    roomy, tight = engine(models), engine(models, kv_cache_bytes=budget(models, 192, 192))
    a, b = play(roomy), play(tight)
    assert {k: r.token_ids for k, r in a.items()} == {k: r.token_ids for k, r in b.items()}
    assert roomy.counters.evictions == 0 and tight.counters.evictions > 0
    assert tight.counters.forwarded > roomy.counters.forwarded
    assert tight.store.nbytes <= tight.store.budget_bytes


def test_the_session_least_recently_used_is_evicted(models):
    core = engine(models, kv_cache_bytes=budget(models, BLOCK, BLOCK))
    for turn, s in enumerate("aba"):
        run(core, request(s, ids(ord(s), 20), n=4, session=s, turn=turn))
    run(core, request("c", ids(3, 20), n=4))
    assert sorted(c.session for c in core.store.caches) == ["a", "c"]
    assert core.counters.evictions == 1


def test_budget_held_by_running_requests_makes_others_wait(models):
    core = engine(models, kv_cache_bytes=budget(models, BLOCK))
    core.submit(request("a", ids(0, 20), n=5))
    core.submit(request("b", ids(1, 20), n=5))
    core.step()
    assert (core.running, core.unfinished) == (1, 2)
    done = run(core)
    check(models, ids(1, 20), done["b"])


def test_growing_cache_never_waits_for_room_that_only_it_holds(models):
    core = engine(models, kv_cache_bytes=budget(models, 3 * BLOCK))
    prompt = ids(0, 60)
    for turn in range(3):  # 64, 128, 192 tokens: growing by half would exceed the budget
        reply = run(core, request(f"r{turn}", prompt, n=4, session="s", turn=turn))[f"r{turn}"]
        check(models, prompt, reply)
        prompt = prompt + reply.token_ids + ids(turn, 60)


def test_request_over_budget_fails_alone(models):
    core = engine(models, kv_cache_bytes=budget(models, BLOCK))
    core.submit(request("big", ids(0, 100), n=5))
    core.submit(request("small", ids(1, 20), n=5))
    outcomes = []
    while core.unfinished:
        outcomes += core.step()
    (name, error), reply = outcomes
    assert name == "big" and "kv_cache_bytes" in str(error)
    check(models, ids(1, 20), reply)


@pytest.mark.parametrize("keep", [0, 1, 50, 99, 103])
def test_prompt_that_rewrites_history(models, keep):
    """Retry, compaction, stripped thinking: the prompt leaves the cached ids at some position."""
    core = engine(models)
    first = ids(0, 100)
    reply = run(core, request("a", first, session="s"))["a"]
    history = first + reply.token_ids
    second = [*history[:keep], 2, *ids(5, 40)]
    rewritten = run(core, request("b", second, session="s", turn=1))["b"]
    check(models, second, rewritten)
    assert rewritten.cached_tokens == (keep if models.flat else 0)
    assert len(core.store.caches) == 1


def test_the_same_prompt_again(models):
    core = engine(models)
    prompt = ids(0, 100)
    a = run(core, request("a", prompt, session="s", turn=0))["a"]
    b = run(core, request("b", prompt, session="s", turn=1))["b"]
    check(models, prompt, b)
    assert a.token_ids != b.token_ids
    assert b.cached_tokens == (99 if models.flat else 0)


def test_sessions_share_a_computed_prefix(flat_models):
    core = engine(flat_models)
    shared = ids(0, 300)
    a = shared + ids(1, 20)
    b = shared + ids(2, 20)
    run(core, request("a", a))
    reply = run(core, request("b", b))["b"]
    check(flat_models, b, reply)
    assert core.counters.copied == 300 and reply.cached_tokens == 300
    again = run(core, request("a2", a, session="a", turn=1))["a2"]
    check(flat_models, a, again)  # the source kept its own tokens


def test_concurrent_requests_of_one_session_do_not_share_a_cache(models):
    core = engine(models)
    prompt = ids(0, 50)
    done = run(core, request("a", prompt, session="s", turn=0), request("b", prompt, session="s", turn=1))
    for r in done.values():
        check(models, prompt, r)


def test_requests_without_a_session_only_extend(models):
    core = engine(models)
    prompt = ids(0, 100)
    a = run(core, request("a", prompt, session=None))["a"]
    longer = prompt + a.token_ids + ids(1, 9)
    b = run(core, request("b", longer, session=None))["b"]
    assert b.cached_tokens == 100 + 8 - 1
    check(models, longer, b)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [16, 512])
def test_forced_reply_has_the_models_logprobs(models, temperature, chunk):
    core = engine(models, prefill_chunk=chunk)
    prompt, reply = ids(0, 40), ids(1, 25)
    out = run(core, request("a", prompt, n=30, forced=reply, temperature=temperature, top_p=0.5, top_k=3))["a"]
    assert out.token_ids == reply and out.stop_reason == "completed"
    check(models, prompt, out, temperature)
    assert core.counters.sampled == 0 and core.counters.forwarded == 64
    follow = prompt + reply + ids(2, 5)
    check(models, follow, run(core, request("b", follow, session="a", turn=1))["b"])


def test_stop_token_ends_the_reply_and_is_part_of_it(models):
    even = set(range(0, 512, 2))
    out = run(engine(models, eos_ids=even), *[request(f"s{i}", ids(i, 9), n=40) for i in range(8)])
    assert any(len(r.token_ids) > 1 for r in out.values())
    for r in out.values():
        assert r.stop_reason == "completed"
        assert r.token_ids[-1] in even and not even & set(r.token_ids[:-1])
    kept = run(engine(models, eos_ids=even), request("x", ids(0, 9), n=10, ignore_eos=True))["x"]
    assert len(kept.token_ids) == 10 and kept.stop_reason == "length" and even & set(kept.token_ids[:-1])


def test_replies_are_replayable_and_differ_by_session_turn_and_seed(models):
    prompt = ids(0, 30)

    def reply(session="s", turn=0, seed=0, **kw) -> list[int]:
        return run(engine(models, seed=seed), request("r", prompt, n=20, session=session, turn=turn, **kw))["r"].token_ids

    assert reply() == reply()
    assert len({tuple(r) for r in (reply(), reply(session="t"), reply(turn=1), reply(seed=1))}) == 4
    assert reply(seed=0, **{"temperature": 0.0}) == reply(session="t", turn=5, seed=9, **{"temperature": 0.0})
    core = engine(models, seed=0)
    own = Request("r", np.array(prompt, np.int32), SamplingParams(20, seed=1), "s", 0)
    assert run(core, own)["r"].token_ids == reply(seed=1)


def test_abort_keeps_what_was_said(models):
    core = engine(models, max_num_seqs=1)
    core.submit(request("a", ids(0, 10), n=20))
    core.submit(request("b", ids(1, 10), n=20))
    for _ in range(4):
        core.step()
    a, b = core.abort_all()
    assert (a.stop_reason, b.stop_reason, len(a.token_ids), b.token_ids) == ("aborted", "aborted", 4, [])
    assert core.unfinished == 0
    longer = ids(0, 10) + a.token_ids
    check(models, longer, run(core, request("c", longer, session="a", turn=1))["c"])


def test_budget_counts_all_that_a_cache_holds(models):
    core = engine(models)
    run(core, request("a", ids(0, 40), n=8))
    assert core.store.nbytes == budget(models, 64)
    run(core, request("b", ids(1, 100), n=8))
    assert core.store.nbytes == budget(models, 64, 128)


def test_dropped_caches_are_computed_again_and_running_ones_are_protected(models):
    core = engine(models)
    prompt = ids(0, 40)
    run(core, request("a", prompt, session="s"))
    core.submit(request("b", prompt, session="s", turn=1))
    core.step()
    with pytest.raises(OpsdError, match="1 requests are running"):
        core.drop_caches()
    run(core)
    core.drop_caches()
    assert core.store.nbytes == 0
    assert run(core, request("c", prompt, session="s", turn=2))["c"].cached_tokens == 0


def test_scores_equal_the_stock_model(models):
    sequences = [ids(0, 30), ids(1, 300)]
    positions = [[0, 28], [5, 6, 299]]
    scored = engine(models).score_logprobs(sequences, positions)
    for seq, pos, out in zip(sequences, positions, scored, strict=True):
        with torch.no_grad():
            expected = torch.log_softmax(models.stock(torch.tensor([seq])).logits[0, pos].float(), -1)
        assert out.dtype == np.float32 and out.shape == (len(pos), 512)
        np.testing.assert_allclose(out, expected.numpy(), atol=ATOL)


@pytest.mark.parametrize(
    ("prompt", "n", "forced", "text"),
    [
        (ids(0, 100), 29, None, "= 129"),
        (ids(0, 128), 1, None, "= 129"),
        ([], 5, None, "empty prompt"),
        (ids(0, 10), 3, [4, 5, 6, 7], "forced reply of 4"),
        (ids(0, 10), 3, [], "forced reply of 0"),
    ],
)
def test_requests_that_do_not_fit_are_refused_not_cut(models, prompt, n, forced, text):
    core = engine(models, max_model_len=128)
    with pytest.raises(OpsdError, match=text):
        core.submit(request("r", prompt, n=n, forced=forced))
    assert core.unfinished == 0
    fits = run(core, request("ok", ids(0, 100), n=28))["ok"]
    assert len(fits.token_ids) == 28
