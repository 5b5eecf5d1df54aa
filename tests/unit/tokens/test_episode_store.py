"""The episode store: exact round trips, refusals, and writes that are cut off."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_chat import random_conversation

from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.tokens import AgentOutcome, Episode, EpisodeStore, FeatureGrade, Grade
from verl_opsd.tokens import store as store_module


def same(a, b) -> bool:
    """Deep equality that also compares types and dtypes."""
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def make_episode(episode_id="e", seed=0, contract="c" * 64, **changes) -> Episode:
    turns, _ = asyncio.run(random_conversation(random.Random(seed), 4))
    features = (
        FeatureGrade(3, True, 12, 0, 0, "ok é\x00\n", False, "too few"),
        FeatureGrade(5, False, 0, 2, None, ""),
    )
    values = {
        "episode_id": episode_id,
        "repo": "pocket",
        "task_id": 7,
        "features": (3, 5),
        "split": "train",
        "contract_hash": contract,
        "outcome": "scored",
        "turns": tuple(dataclasses.replace(t, episode_id=episode_id, contract_hash=contract) for t in turns),
        "agents": (
            AgentOutcome("agent1", 3, "Submitted", 9, "diff --git 漢😀\udce9\r\n", 2, True, None, 2**40, 7),
            AgentOutcome("agent2", 5, "Error", 0, "", 0, False, "boom"),
        ),
        "grade": Grade("clean", None, {"agent1": "applied", "agent2": "failed"}, features, 1.25, "solo-agent2"),
        "brief_kinds": {"agent1": "guidance", "agent2": "none"},
        "model_version": 4,
        "near_benchmark": "tree from a release",
        "t_start": 1.0 / 3.0,
        "t_end": 1e9 + 0.1,
        "messages": {"agent1": [{"role": "user", "content": None, "extra": {"x": [1, 2.5, "\ud800 é"]}}], "agent2": []},
        **changes,
    }
    return Episode(**values)


def test_round_trip_is_exact(tmp_path):
    store = EpisodeStore(tmp_path / "new" / "store")
    assert store.contract_hash is None and store.ids() == []
    whole = make_episode("pocket/task7/f3_f5 #1")
    bare = make_episode(".hidden", grade=None, outcome="infra:engine_died", turns=(), agents=(), messages={})
    for episode in (whole, bare):
        store.write(episode)
        assert same(store.read(episode.episode_id), episode)
    again = EpisodeStore(tmp_path / "new" / "store")
    assert again.ids() == [".hidden", "pocket/task7/f3_f5 #1"] and again.contract_hash == "c" * 64
    assert all(same(a, b) for a, b in zip(again.episodes(), (bare, whole), strict=True))


def test_round_trip_keeps_empty_arrays_and_extreme_values(tmp_path):
    base = make_episode(seed=1)
    odd = dataclasses.replace(
        base.turns[0],
        new_ids=np.zeros(0, np.int32),
        response_ids=np.array([2**31 - 1, 0], np.int32),
        response_logprobs=np.array([-1e-45, -3.4e38], np.float32),
        t_start=0.1 + 0.2,
    )
    episode = dataclasses.replace(base, turns=(odd, *base.turns[1:]))
    EpisodeStore(tmp_path).write(episode)
    assert same(EpisodeStore(tmp_path).read("e"), episode)


@settings(max_examples=25, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
    logprobs=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
    strategy=st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
    seed=st.integers(0, 1000),
)
def test_round_trip_property(tmp_path_factory, text, logprobs, strategy, seed):
    episode = make_episode(episode_id=f"e{text[:10]}", seed=seed, messages={text: [{"content": text}]})
    turn = dataclasses.replace(
        episode.turns[0],
        stop_reason=text,
        response_ids=np.arange(len(logprobs), dtype=np.int32),
        response_logprobs=np.array(logprobs, np.float32),
    )
    grade = dataclasses.replace(episode.grade, strategy=strategy, apply_status={text: "", "b": text})
    episode = dataclasses.replace(episode, turns=(turn, *episode.turns[1:]), grade=grade)
    directory = tmp_path_factory.mktemp("store")
    EpisodeStore(directory).write(episode)
    assert same(EpisodeStore(directory).read(episode.episode_id), episode)


def test_an_episode_is_never_replaced(tmp_path):
    store = EpisodeStore(tmp_path)
    first = make_episode()
    store.write(first)
    with pytest.raises(OpsdError, match="exists"):
        store.write(make_episode(seed=2))
    assert same(store.read("e"), first)


def test_contracts_are_never_mixed(tmp_path):
    store = EpisodeStore(tmp_path)
    store.write(make_episode())
    with pytest.raises(OpsdError, match="contract"):
        EpisodeStore(tmp_path).write(make_episode("other", contract="d" * 64))
    stranger = make_episode("third")
    stranger = dataclasses.replace(
        stranger, turns=(dataclasses.replace(stranger.turns[0], contract_hash="d" * 64), *stranger.turns[1:])
    )
    with pytest.raises(OpsdError, match="own id and contract"):
        store.write(stranger)
    with pytest.raises(OpsdError, match="own id and contract"):
        store.write(dataclasses.replace(make_episode("x"), episode_id="fourth"))
    assert store.ids() == ["e"]


def test_the_fields_that_differ_are_named(tmp_path):
    ours, theirs = EvalContract(step_limit=7), EvalContract(step_limit=8)
    EpisodeStore(tmp_path, ours).write(make_episode(contract=ours.hash))
    other = EpisodeStore(tmp_path, theirs)
    with pytest.raises(OpsdError, match=r"step_limit: 7 there, 8 here"):
        other.write(make_episode("second", contract=theirs.hash))
    with pytest.raises(OpsdError, match="opened for contract"):
        other.write(make_episode("third", contract=ours.hash))
    assert other.ids() == ["e"]


def test_another_schema_version_is_refused(tmp_path, monkeypatch):
    EpisodeStore(tmp_path).write(make_episode())
    store = EpisodeStore(tmp_path)
    table = pq.read_table(tmp_path / "e" / "turns.parquet")
    assert table.schema.metadata[b"opsd_schema"] == b"4" and table.schema.metadata[b"contract_hash"] == b"c" * 64
    monkeypatch.setattr(store_module, "STORE_SCHEMA", 5)
    with pytest.raises(OpsdError, match="schema version 4"):
        EpisodeStore(tmp_path)
    with pytest.raises(OpsdError):
        store.read("e")
    monkeypatch.undo()
    pq.write_table(table.replace_schema_metadata({"opsd_schema": "5"}), tmp_path / "e" / "turns.parquet")
    with pytest.raises(OpsdError, match="opsd_schema"):
        store.read("e")


@pytest.mark.parametrize("name", ["turns", "grades", "episodes"])
@pytest.mark.parametrize("damage", ["absent", "cut", "columns"])
def test_damaged_episodes_are_refused(tmp_path, name, damage):
    store = EpisodeStore(tmp_path)
    store.write(make_episode())
    path = tmp_path / "e" / f"{name}.parquet"
    if damage == "absent":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        table = pq.read_table(path)
        pq.write_table(table.drop_columns(table.column_names[0]), path)
    with pytest.raises(OpsdError):
        store.read("e")


def test_unknown_episode_and_empty_id(tmp_path):
    with pytest.raises(OpsdError, match="only episodes that were written"):
        EpisodeStore(tmp_path).read("nothing")
    with pytest.raises(OpsdError):
        EpisodeStore(tmp_path).write(make_episode(""))


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": {"a": [{"content": ("tuple",)}]}},
        {"messages": {"a": [{"content": float("nan")}]}},
        {"messages": {"a": [{"content": b"bytes"}]}},
        {"messages": {1: []}},
        {"repo": "\ud800"},
        {"grade": None},
        {"outcome": "infra:sandbox_died"},
        {"outcome": "failed", "grade": None},
        {"grade": Grade("clean", None, {}, (FeatureGrade(3, True, 1, 0, 0),))},
    ],
    ids=["tuple", "nan", "bytes", "number key", "surrogate", "no grade", "fault with grade", "outcome", "one feature"],
)
def test_what_can_not_be_stored_exactly_is_refused(tmp_path, changes):
    store = EpisodeStore(tmp_path)
    with pytest.raises(OpsdError):
        store.write(make_episode(**changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "kind"), [("new_ids", np.int64), ("response_ids", np.int64), ("response_logprobs", np.float64)]
)
def test_arrays_that_would_be_rounded_are_refused(tmp_path, name, kind):
    episode = make_episode()
    turn = dataclasses.replace(episode.turns[-1], **{name: getattr(episode.turns[-1], name).astype(kind)})
    with pytest.raises(OpsdError, match="nothing is rounded"):
        EpisodeStore(tmp_path).write(dataclasses.replace(episode, turns=(*episode.turns[:-1], turn)))


def test_a_failing_write_leaves_nothing(tmp_path, monkeypatch):
    store = EpisodeStore(tmp_path)
    real, calls = pq.write_table, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise OSError("disk full")
        return real(*args, **kwargs)

    monkeypatch.setattr(store_module.pq, "write_table", failing)
    with pytest.raises(OSError, match="disk full"):
        store.write(make_episode())
    assert store.ids() == [] and [p.name for p in tmp_path.iterdir()] == ["store.json"]
    store.write(make_episode())
    assert store.ids() == ["e"]


def test_a_killed_write_leaves_no_visible_episode(tmp_path):
    """A process killed between the files of an episode; afterwards the same episode can be written."""
    code = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[2])
        from test_episode_store import make_episode, store_module
        from verl_opsd.tokens import EpisodeStore
        real, calls = store_module.pq.write_table, []
        def killing(*args, **kwargs):
            real(*args, **kwargs)
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        store_module.pq.write_table = killing
        EpisodeStore(sys.argv[1]).write(make_episode())
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), here]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    store = EpisodeStore(tmp_path)
    assert store.ids() == [] and list(store.episodes()) == []
    assert any(p.name.startswith(".") for p in tmp_path.iterdir())  # the torn write is there, and is not seen
    store.write(make_episode())
    assert same(store.read("e"), make_episode())


WRITERS = 20
KILLED = """
    import os, random, signal, sys, time
    sys.path.insert(0, sys.argv[2])
    from test_episode_store import make_episode
    from verl_opsd.tokens import EpisodeStore

    def write_on(store, n, told):
        for i in range(1000):
            store.write(make_episode(f"{n}-{i}", seed=i % 3))
            os.write(told, f"{n}-{i}\\n".encode())

    first = EpisodeStore(f"{sys.argv[1]}/first")
    first.write(make_episode("imports"))
    dice, told = random.Random(0), os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND)
    for n in range(int(sys.argv[4])):
        writer = os.fork()
        if not writer:
            write_on(EpisodeStore(f"{sys.argv[1]}/{n % 4}"), n, told)
        started = time.monotonic()
        first.write(make_episode(str(n)))  # as long as the writer needs for one, on this host at this moment
        time.sleep(dice.uniform(0, 2) * (time.monotonic() - started))
        os.kill(writer, signal.SIGKILL)
        assert os.waitpid(writer, 0)[1] == signal.SIGKILL
"""


def test_kill_9_of_writers_at_any_moment(tmp_path):
    """Each ended from outside at a random moment: what was written stays, nothing torn is read as whole, and the next writer goes on."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = tmp_path / "finished"
    finished.touch()
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), os.path.dirname(__file__), str(finished)]
    ended = subprocess.run([*command, str(WRITERS)], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    seen, torn = set(), 0
    for n in range(4):
        store = EpisodeStore(tmp_path / str(n))
        torn += sum(p.name.endswith(".tmp") for p in store.directory.iterdir())
        seen |= set(store.ids())
        for episode in store.episodes():
            assert same(episode, make_episode(episode.episode_id, seed=int(episode.episode_id.split("-")[1]) % 3))
        store.write(make_episode("after"))
    told = set(finished.read_text().split())
    assert len(told) >= WRITERS / 4 and told <= seen and len(seen - told) <= WRITERS
    assert torn >= WRITERS / 8, "too few were in the middle of a write"
