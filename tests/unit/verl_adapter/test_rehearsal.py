"""The rehearsed publication: what it finds of a server that ignores an adapter or a part of it, and what it leaves behind."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir
from verl_opsd.verl_adapter import guards, rehearsal

PARTS = 10  # of an adapter, each with a direction of its own: a part that is not bound is a tenth of the move


@pytest.mark.parametrize(
    ("ours", "theirs", "share", "rest"),
    [
        ([3.0, 4.0], [3.0, 4.0], 1.0, 0.0),
        ([3.0, 4.0], [0.0, 0.0], 0.0, 0.0),
        ([3.0, 4.0], [1.5, 2.0], 0.5, 0.0),
        ([3.0, 4.0], [-1.0, 7.0], 1.0, 1.0),  # beside the move: (-4, 3), as long as it
        ([3.0, 4.0], [3.0, 0.0], 9 / 25, 144 / 625),  # the second token's part is missing
    ],
)
def test_share_and_rest_by_hand(ours, theirs, share, rest):
    assert rehearsal.unmade(np.array(ours), np.array(theirs), 0.0) == pytest.approx((share, rest), abs=1e-12)


class Run:
    """A trainer of ``PARTS`` parts whose tokens move by ``effect`` nats a unit of lora_B, and servers that bind some of them.

    ``bound``: parts that a server takes over, from its ``first`` publication on.
    """

    def __init__(self, path, monkeypatch, effect=2.0, rounding=0.0, bound=(PARTS, PARTS), first=0, backend="vllm", rank=8):
        rng = np.random.default_rng(2)
        tokens = guards.FOLLOW_TOKENS - 1
        self._directions = rng.normal(0, effect / np.sqrt(PARTS), (PARTS, tokens))
        self._noise = lambda: rng.normal(0, rounding, tokens)
        self._bound, self._first, self._published = bound, first, 0
        self.trained = self.now = 0.001
        self.scales, self.slept = [], 0
        self.served = [np.full(PARTS, 0.001) for _ in bound]
        self.run_dir, self.global_steps, self.tokenizer = RunDir(path), 3, range(1000)
        gates = SimpleNamespace(publish_kl_max=1e-2, publish_rehearsal_max=0.1)
        self.opsd = SimpleNamespace(gates=gates)
        self.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name=backend)))
        stats = {"tensors": 2 * PARTS if rank else 0, "compute": "bfloat16" if rounding else "float32"}
        self.actor_rollout_wg = SimpleNamespace(
            opsd_adapter_stats=lambda: [stats], opsd_token_logprobs=self._token_logprobs, opsd_rehearse=self._rehearse
        )
        self.checkpoint_manager = SimpleNamespace(sleep_replicas=self._sleep, update_weights=self._publish)
        replicas = [SimpleNamespace(_server_handle=n) for n in range(len(bound))]
        self.llm_server_manager = SimpleNamespace(get_replicas=lambda: replicas)
        monkeypatch.setattr(guards, "_given_logprobs", lambda n, ids: self.served[n] @ self._directions - 5 + self._noise())
        self.followed = guards.fixed_probe(self, list(range(len(bound))))

    def _token_logprobs(self, sequences, positions):
        return [[np.full(PARTS, self.now) @ self._directions - 5 + self._noise()]]

    def _rehearse(self, scale):
        self.scales.append(scale)
        self.now = self.trained if scale is None else scale

    def _sleep(self):
        self.slept += 1

    def _publish(self, version):
        assert version == 3 and self.slept == self._published + 1  # a server that is awake has no room for weights
        self._published += 1
        if self._published > self._first:
            for weights, parts in zip(self.served, self._bound, strict=True):
                weights[:parts] = self.now

    def lines(self):
        path = self.run_dir.path / "evidence.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("rounding", [0.0, 0.07])
def test_servers_that_bind_the_whole_adapter_pass_there_and_back(tmp_path, monkeypatch, rounding):
    run = Run(tmp_path, monkeypatch, rounding=rounding)
    rehearsal.rehearse(run)
    found = run.lines()
    assert [v["gate"] for v in found] == ["publish_rehearsal"] * 4 + ["publish_kl"] * 2
    assert {v["verdict"] for v in found} == {"pass"} and run.scales[-1] is None and run.now == run.trained
    assert run._published == 2 and all((s == run.trained).all() for s in run.served)
    if not rounding:
        assert max(v["value"] for v in found) < 1e-12
        effect = np.sqrt(np.mean(np.square(run._directions.sum(0))))  # nats a unit, in the root mean square
        assert run.scales[:-1] == pytest.approx([2**-8 * 2 ** (n / 2) for n in range(len(run.scales) - 1)])
        moves = effect * (np.array(run.scales[:-1]) - run.trained)
        assert moves[-1] >= 0.1 and (moves[:-1] < 0.1).all()  # the first one that tells


@pytest.mark.parametrize("rounding", [0.0, 0.07])
@pytest.mark.parametrize("parts", [0, 5, 8])
def test_a_server_that_binds_a_part_is_found_by_the_share_that_it_lacks(tmp_path, monkeypatch, rounding, parts):
    """Independent parts of equal effect: the server makes parts/PARTS of the move."""
    run = Run(tmp_path, monkeypatch, rounding=rounding, bound=(PARTS, parts))
    with pytest.raises(OpsdError, match="publish_rehearsal"):
        rehearsal.rehearse(run)
    good, bad = run.lines()
    assert (good["verdict"], bad["verdict"]) == ("pass", "fail")
    assert bad["value"] == pytest.approx(1 - parts / PARTS, abs=0.05)
    assert run.now == run.trained and run.scales[-1] is None


def test_a_server_that_does_not_come_back_is_found(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    publish, run.checkpoint_manager.update_weights = run.checkpoint_manager.update_weights, None
    run.checkpoint_manager.update_weights = lambda version: publish(version) if run._published < 1 else None
    with pytest.raises(OpsdError, match="publish_rehearsal"):
        rehearsal.rehearse(run)
    assert "back to the trained" in run.lines()[-1]["detail"] and run.now == run.trained


def test_an_adapter_without_effect_is_an_error_after_a_bounded_search(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, effect=1e-9)
    with pytest.raises(OpsdError, match="move log-probabilities by"):
        rehearsal.rehearse(run)
    assert len(run.scales) == rehearsal.SCALES + 1 and run.scales[-1] is None and run._published == 0


@pytest.mark.parametrize("place", ["sleep_replicas", "update_weights"])
def test_trained_values_are_back_whatever_fails(tmp_path, monkeypatch, place):
    run = Run(tmp_path, monkeypatch)

    def die(*args):
        raise RuntimeError("a server is gone")

    setattr(run.checkpoint_manager, place, die)
    with pytest.raises(RuntimeError, match="a server is gone"):
        rehearsal.rehearse(run)
    assert run.now == run.trained and run.scales[-1] is None


@pytest.mark.parametrize("case", [{"backend": "opsd_embedded"}, {"rank": 0}])
def test_own_servers_and_full_parameters_are_not_rehearsed(tmp_path, monkeypatch, case):
    run = Run(tmp_path, monkeypatch, **case)
    rehearsal.rehearse(run)
    assert run.scales == [] and run.lines() == [] and run._published == 0
