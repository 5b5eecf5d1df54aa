"""Sampling: what is drawn, how often, and which log-probability is reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.rollout.sampling import SamplingParams, processed_logprobs, request_generator, sample

LOGITS = [2.0, 1.0, 0.0, -1.0, -5.0]


def reference(logits: list[float], temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Probabilities by the definition, one token at a time, in float64."""
    z = np.array(logits, np.float64) / temperature
    order = np.argsort(-z, kind="stable")
    keep = [i for i in order if top_k == -1 or (z > z[i]).sum() < top_k]
    p = np.exp(z - z.max())
    p = {i: p[i] / sum(p[j] for j in keep) for i in keep}
    mass, kept = 0.0, []
    for i in keep:
        if mass >= top_p and top_p < 1:
            break
        kept.append(i)
        mass += p[i]
    out = np.zeros(len(logits))
    for i in kept:
        out[i] = p[i] / mass
    return out


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.31, 0.52, 0.83, 1.0]),
    top_k=st.sampled_from([-1, 1, 2, 5, 100]),
)
def test_processed_distribution_follows_the_definition(logits, temperature, top_p, top_k):
    values = [x / 7 for x in logits]
    got = processed_logprobs(torch.tensor(values), SamplingParams(1, temperature, top_p, top_k)).exp().double().numpy()
    np.testing.assert_allclose(got, reference(values, temperature, top_p, top_k), atol=1e-5)


def test_without_limits_it_is_the_plain_log_softmax():
    z = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(processed_logprobs(z, SamplingParams(1)), torch.log_softmax(z, -1))


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.5, 1.0, -1), (2.0, 1.0, 3), (1.0, 0.8, -1)])
def test_frequencies_match_and_logprobs_are_those_of_the_drawn_token(temperature, top_p, top_k):
    params, generator, n = SamplingParams(1, temperature, top_p, top_k), request_generator(0, "s", 0), 20000
    p = reference(LOGITS, temperature, top_p, top_k)
    counts = np.zeros(5)
    for _ in range(n):
        token, logp = sample(torch.tensor(LOGITS), params, generator)
        counts[token] += 1
        assert abs(logp - np.log(p[token])) < 1e-5
    assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1e-9).all()


def test_greedy_takes_the_largest_and_reports_the_plain_logprob():
    token, logp = sample(torch.tensor(LOGITS), SamplingParams(1, temperature=0.0, top_k=1), request_generator(0, "s", 0))
    assert token == 0 and logp == pytest.approx(2.0 - np.log(np.exp(LOGITS).sum()), abs=1e-6)


def test_verls_dict_is_understood():
    given_ = {"temperature": 0.6, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    assert SamplingParams.parse(given_, 77) == SamplingParams(77, 0.6, 0.9, -1, False, True)
    assert SamplingParams.parse({"max_new_tokens": 5}, 77) == SamplingParams(5, logprobs=False)
    assert SamplingParams.parse({"logprobs": 0}, 1).logprobs is True
    assert SamplingParams.parse({"logprobs": None}, 1).logprobs is False


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"min_p": 0.1}, "min_p"),
        ({"stop": ["x"]}, "stop"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_what_is_not_implemented_or_out_of_range_is_refused(given_, text):
    with pytest.raises(OpsdError, match=text):
        SamplingParams.parse(given_, 8)
