"""The embedded backend through verl's own server manager, load balancer and client, in real Ray actors."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_opsd.errors import OpsdError

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster():
    import ray

    from verl_opsd.verl_adapter import platform, rollout

    platform.register()
    import verl.workers.rollout.base
    import verl.workers.rollout.replica

    rollout.register_replica(verl.workers.rollout.replica)
    rollout.register_rollout(verl.workers.rollout.base)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def start(ray, config, ranks: int):
    """verl's server manager over stand-ins for the trainer's ranks (only their node is asked for)."""
    from verl.workers.rollout.llm_server import LLMServerManager

    @ray.remote(num_cpus=0)
    class Rank:
        pass

    group = SimpleNamespace(workers=[Rank.remote() for _ in range(ranks)], world_size=ranks)
    return LLMServerManager.create(config, worker_group=group), group


def reference_logprobs(model: torch.nn.Module, prompt: list[int], reply: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([prompt + reply])).logits[0].float(), -1)
    return logp[torch.arange(len(prompt) - 1, len(prompt) + len(reply) - 1), torch.tensor(reply)]


def test_sessions_and_adapter_update_on_two_replicas(cluster, model_path, compose_config, monkeypatch):
    from peft import LoraConfig, get_peft_model
    from peft.utils.save_and_load import get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    from verl_opsd.verl_adapter.rollout.adapter import EmbeddedAdapter

    ray = cluster
    config = compose_config(model_path, "opsd_embedded")
    manager, _ranks = start(ray, config, ranks=2)
    client = manager.get_client()
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")
    rng = np.random.default_rng(0)
    params = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "max_tokens": 12,
    }

    async def play(session: str, turns: int) -> list[tuple[list[int], object]]:
        ids, played = rng.integers(3, 2000, 150).tolist(), []
        for turn in range(turns):
            out = await client.generate(session, prompt_ids=list(ids), sampling_params=dict(params), session=session, turn=turn)
            played.append((list(ids), out))
            ids += out.token_ids + rng.integers(3, 2000, 30).tolist()
        return played

    async def play_all(names: list[str]) -> list[list[tuple[list[int], object]]]:
        return await asyncio.gather(*[play(n, 3) for n in names])

    sessions = asyncio.run(play_all(["s0", "s1", "s2", "s3"]))
    for played in sessions:
        for turn, (prompt, out) in enumerate(played):
            assert out.stop_reason == ("completed" if out.token_ids[-1] == 2 else "length")
            assert len(out.token_ids) == 12 or out.token_ids[-1] == 2
            np.testing.assert_allclose(out.log_probs, reference_logprobs(reference, prompt, out.token_ids), atol=1e-5)
            held = len(played[turn - 1][0]) + len(played[turn - 1][1].token_ids) - 1 if turn else 0
            assert out.extra_fields["num_cached_tokens"] == held
    counters = [ray.get(h.counters.remote()) for h in manager.server_handles]
    assert sum(c["requests"] for c in counters) == 12 and min(c["requests"] for c in counters) > 0
    assert sum(c["forwarded"] for c in counters) == sum(len(s[-1][0]) + len(s[-1][1].token_ids) - 1 for s in sessions)

    # Publish an adapter from each rank to its own replica, as verl's engine sends it.
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    trained = get_peft_model(reference, lora)
    with torch.no_grad():
        for name, p in trained.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.from_numpy(rng.standard_normal(tuple(p.shape)) * 0.2))
    tensors = get_peft_model_state_dict(trained)
    drained = []

    def stream():
        yield from tensors.items()
        drained.append(True)

    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        adapter = EmbeddedAdapter(config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, None)
        asyncio.run(adapter.update_weights(stream(), peft_config=lora.to_dict(), base_sync_done=True, global_steps=7))
        report = ray.get(adapter.server.adapter_report.remote())
        assert report["bound"] == len(tensors) == 12 and report["step"] == 7 and report["zero_B"] == ()
        assert report["dtypes"] == ("torch.float32",)
    assert len(drained) == 2

    # The published weights are what every replica serves now, the old caches are gone, and a bad key changes nothing.
    prompt, _ = sessions[0][0]
    expected = torch.log_softmax(trained(torch.tensor([prompt])).logits[0, [3, 149]].float(), -1).detach().numpy()
    for handle in manager.server_handles:
        (scored,) = ray.get(handle.score_logprobs.remote([prompt], [[3, 149]]))
        assert scored.dtype == np.float32
        np.testing.assert_allclose(scored, expected, atol=1e-5)
    with pytest.raises(OpsdError, match=r"unexpected.*nonsense"):
        bad = {**tensors, "base_model.model.nonsense.lora_A.weight": torch.zeros(1)}
        asyncio.run(adapter.update_weights(iter(bad.items()), peft_config=lora.to_dict(), global_steps=8))
    out = asyncio.run(client.generate("s0", prompt_ids=prompt, sampling_params=dict(params), session="s0", turn=9))
    assert out.extra_fields["num_cached_tokens"] == 0 and out.extra_fields["global_steps"] == 7
    np.testing.assert_allclose(out.log_probs, reference_logprobs(trained, prompt, out.token_ids), atol=1e-5)
    with pytest.raises(OpsdError, match="2048 tokens"):
        too_long = {**params, "max_tokens": 2000}
        asyncio.run(client.generate("s0", prompt_ids=prompt, sampling_params=too_long, session="s0", turn=10))


def test_scripted_replies_and_faults(cluster, model_path, compose_config, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ray = cluster
    script = {"pair": {"agent1": ["hello", {"text": "run", "command": 'ls "a"'}, {"fault": "raise"}, {"fault": "die"}]}}
    (tmp_path / "script.json").write_text(json.dumps(script))
    config = compose_config(
        model_path,
        "opsd_scripted",
        f"+actor_rollout_ref.rollout.engine_kwargs.opsd.script={tmp_path}/script.json",
    )
    manager, _ranks = start(ray, config, ranks=1)
    client = manager.get_client()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    prompt = list(range(3, 60))
    params = {"temperature": 1.0, "logprobs": True, "max_tokens": 64}

    def turn(n: int):
        return asyncio.run(
            client.generate("r", prompt_ids=prompt, sampling_params=dict(params), session="pair|e1|agent1", turn=n)
        )

    first, second = turn(0), turn(1)
    assert tokenizer.decode(first.token_ids) == "hello<|im_end|>"
    assert tokenizer.decode(second.token_ids) == (
        'run\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls \\"a\\""}}\n</tool_call><|im_end|>'
    )
    np.testing.assert_allclose(second.log_probs, reference_logprobs(model, prompt, second.token_ids), atol=1e-5)
    with pytest.raises(OpsdError, match="scripted fault"):
        turn(2)
    with pytest.raises(OpsdError, match="pair pair, agent1, turn 4"):
        turn(4)
    with pytest.raises(ray.exceptions.RayActorError):
        turn(3)
