"""The publish guard for servers that round: whether the server made the move that the trained weights made."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir
from verl_opsd.verl_adapter import guards


@pytest.mark.parametrize(
    ("ours", "theirs", "share", "error"),
    [
        ([0.3, -0.1], [0.3, -0.1], 1.0, 0.0),
        ([0.3, -0.1], [0.0, 0.0], 0.0, 0.0),
        ([0.4, 0.2], [0.2, 0.1], 0.5, 0.0),
        ([1.0, 0.0], [1.0, 1.0], 1.0, 1.0),  # rest (0, 1), one degree of freedom, square 1
        ([2.0, 0.0, 0.0], [2.0, 2.0, 2.0], 1.0, 1.0),  # rest (0, 2, 2): sqrt(8 / 2 / 4)
        ([0.0, 0.0], [0.1, 0.2], 0.0, np.inf),
    ],
)
def test_share_and_error_by_hand(ours, theirs, share, error):
    assert guards.share_of_move(np.array(ours), np.array(theirs)) == pytest.approx((share, error), abs=1e-12)


@pytest.mark.parametrize("true_share", [0.0, 1.0])
def test_the_error_is_the_spread_of_the_share(true_share):
    rng = np.random.default_rng(0)
    ours = rng.normal(0, 0.009, 256)
    found = [guards.share_of_move(ours, true_share * ours + rng.normal(0, 0.02, 256)) for _ in range(500)]
    shares, errors = np.array(found).T
    assert shares.mean() == pytest.approx(true_share, abs=4 * errors.mean() / np.sqrt(500))
    assert shares.std() == pytest.approx(errors.mean(), rel=0.15)


def test_rounding_of_the_trainer_does_not_pull_the_share_down():
    """ours = move + own rounding: the plain slope is var(move) / var(ours), here a half; divided by it the share is unbiased."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(500):
        move = rng.normal(0, 0.01, 256)
        ours, theirs = move + rng.normal(0, 0.01, 256), move + rng.normal(0, 0.01, 256)
        found.append((*guards.share_of_move(ours, theirs), *guards.share_of_move(ours, theirs, 0.01**2)))
    plain, _, share, error = np.array(found).T
    assert plain.mean() == pytest.approx(0.5, abs=0.02) and share.mean() == pytest.approx(1.0, abs=0.05)
    assert error.mean() > guards.FOLLOW_ERROR / 2


def test_a_move_within_the_trainers_rounding_tells_nothing():
    ours = np.array([0.01, -0.01])
    assert guards.share_of_move(ours, ours, 0.01**2) == (0.0, np.inf)


class Run:
    """A trainer whose weights move ``step`` nats a version at every probed token, and a server that rounds."""

    def __init__(self, path, monkeypatch, step: float, rounding: float, serves, own: float = 0.0):
        self.run_dir, self.followed, self.global_steps = RunDir(path), None, 0
        self.opsd = SimpleNamespace(gates=SimpleNamespace(publish_follow_min=0.5))
        self.tokenizer = range(1000)
        self.actor_rollout_wg = SimpleNamespace(opsd_token_logprobs=self._logprobs)
        rng = np.random.default_rng(1)
        self._direction = rng.normal(0, step, guards.FOLLOW_TOKENS - 1)
        self._own, self._rounds = rng.normal(0, own, (20, guards.FOLLOW_TOKENS - 1)), own > 0
        monkeypatch.setattr(
            guards,
            "_given_logprobs",
            lambda server, ids: self._direction * serves(self.global_steps) - 5 + rng.normal(0, rounding, len(ids) - 1),
        )

    def _logprobs(self, sequences, positions):
        return [[self._direction * self.global_steps - 5 + self._own[self.global_steps]]]

    def publish(self, version: int) -> dict:
        self.global_steps = version
        guards._require_followed(self, ["server"], self._rounds)
        lines = (self.run_dir.path / "evidence.jsonl").read_text().splitlines() if version else ["{}"]
        return json.loads(lines[-1])


def test_a_server_that_rounds_as_much_as_an_update_moves_passes_when_it_follows(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, step=0.01, rounding=0.01, serves=lambda version: version)
    run.publish(0)
    for version in (1, 2, 3):
        line = run.publish(version)
        assert line["gate"] == "publish_follow" and line["verdict"] == "pass" and 0.6 < line["value"] < 1.4


@pytest.mark.parametrize("rounding", [0.0, 0.01])
@pytest.mark.parametrize("stuck_at", [0, 1, 2])
def test_a_server_that_keeps_an_old_version_fails_at_the_next_one(tmp_path, monkeypatch, rounding, stuck_at):
    run = Run(tmp_path, monkeypatch, step=0.01, rounding=rounding, serves=lambda version: min(version, stuck_at))
    for version in range(stuck_at + 1):
        run.publish(version)
    with pytest.raises(OpsdError, match="publish_follow"):
        run.publish(stuck_at + 1)


def test_moves_too_small_to_tell_add_up_until_a_stale_server_is_found(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, step=0.002, rounding=0.01, serves=lambda version: 0)
    run.publish(0)
    line = run.publish(1)
    assert "too small a move to tell" in line["detail"] and line["verdict"] == "recorded"
    with pytest.raises(OpsdError, match="publish_follow"):
        for version in range(2, 10):
            run.publish(version)


def test_moves_too_small_to_tell_add_up_until_a_server_is_seen_to_follow(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, step=0.002, rounding=0.01, serves=lambda version: version)
    run.publish(0)
    details = [run.publish(version)["detail"] for version in range(1, 10)]
    assert "too small" in details[0] and any("too small" not in d for d in details)


def test_where_both_round_a_server_that_follows_never_fails(tmp_path, monkeypatch):
    """Updates far below the rounding of either side, as bf16 with a small learning rate."""
    run = Run(tmp_path, monkeypatch, step=0.001, rounding=0.008, serves=lambda version: version, own=0.008)
    lines = [run.publish(version) for version in range(20)][1:]
    assert all(line["verdict"] == ("recorded" if "too small" in line["detail"] else "pass") for line in lines)
    assert "too small" in lines[0]["detail"]


def test_where_both_round_a_stale_server_is_found_as_moves_add_up(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, step=0.002, rounding=0.008, serves=lambda version: 0, own=0.008)
    with pytest.raises(OpsdError, match="publish_follow"):
        for version in range(20):
            run.publish(version)


def test_where_both_round_a_server_that_did_not_change_at_all_fails_at_once(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, step=0.001, rounding=0.0, serves=lambda version: 0, own=0.008)
    run.publish(0)
    with pytest.raises(OpsdError, match="publish_follow"):
        run.publish(1)


def test_another_server_is_compared_at_every_loss_position_of_the_prefix(monkeypatch):
    """Rows of 3000, 40 and 50 tokens: two are looked at, the first up to token 2047; whole distributions at 16 positions each."""
    rows = [(3000, range(100, 2999, 3)), (40, range(10, 39)), (50, range(5))]
    data = {
        "input_ids": torch.nested.as_nested_tensor([torch.arange(n) for n, _ in rows], layout=torch.jagged),
        "opsd_position": torch.nested.as_nested_tensor([torch.tensor(list(p)) for _, p in rows], layout=torch.jagged),
    }
    monkeypatch.setattr(guards.tq, "kv_batch_get", lambda **kwargs: data)
    batch = SimpleNamespace(keys=[], partition_id="train")
    sequences, positions = guards._probes(None, batch, guards.PROBE_TOKENS)
    assert positions == [list(range(100, 2047, 3)), list(range(10, 39))]
    assert sequences == [list(range(positions[0][-1] + 2)), list(range(40))] and len(sequences[0]) <= 2048
    assert guards._probes(None, batch, guards.PROBE_POSITIONS)[1] == [list(range(100, 148, 3)), list(range(10, 26))]
