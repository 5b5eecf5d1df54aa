"""Parts of the page by themselves: whose divergence it is, what is left out, decoding, blocks, plots, denominators."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path

import numpy as np
import pytest
from chat_tokenizer import chat_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.behaviour.definitions import DEFINITIONS
from verl_opsd.evaluation.numbers import denominator
from verl_opsd.evaluation.page import plots
from verl_opsd.evaluation.page.conversations import Decoder, _units, blocks, conversation, quantise
from verl_opsd.evaluation.page.kl_join import join
from verl_opsd.evaluation.page.redact import Secrets, redacted, secrets_of, spans
from verl_opsd.evaluation.shapes import BehaviourMetric
from verl_opsd.tokens.branches import loss_positions
from verl_opsd.tokens.records import AgentOutcome, Episode, Sampling, Trajectory, TurnRecord

# ---- whose divergence it is -------------------------------------------------------------------------------------------


def trajectory(name: str, turns: list[tuple[int, int]], rng: np.random.Generator) -> Trajectory:
    """``turns``: (context tokens, reply tokens)."""
    mask = np.concatenate([np.repeat([0, 1], pair) for pair in turns]).astype(np.int8)
    index = np.concatenate([[-1] * a + [i] * b for i, (a, b) in enumerate(turns)]).astype(np.int32)
    n = len(mask)
    return Trajectory(
        name,
        "agent1",
        0,
        np.zeros(n, np.int32),
        mask,
        index,
        np.zeros(n, np.int8),
        rng.normal(size=n).astype(np.float32),
        "c",
        (0, 0),
    )


def stream(rows: list[Trajectory], rng: np.random.Generator) -> tuple[dict[str, np.ndarray], list[str]]:
    """Values of rows one after another, and the sorted names of the rows."""
    names = sorted(f"{t.episode_id}/{t.agent_id}/{t.branch}" for t in rows)
    at = [loss_positions(t.loss_mask) for t in rows]
    values = {
        "row": [np.full(len(p), names.index(f"{t.episode_id}/agent1/0")) for t, p in zip(rows, at, strict=True)],
        "turn": [t.turn_index[p + 1] for t, p in zip(rows, at, strict=True)],
        "divergence": [rng.random(len(p)) for p in at],
    }
    return {k: np.concatenate(v).astype(np.float32) if rows else np.zeros(0, np.float32) for k, v in values.items()}, names


TURNS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3)


@given(st.lists(TURNS, max_size=6), st.randoms(use_true_random=False))
def test_rows_in_any_order_find_their_branches(shapes, random):
    """Also branches of one shape, and branches that are no row."""
    rng = np.random.default_rng(random.randint(0, 2**31))
    rows = [trajectory(f"e{i}", turns, rng) for i, turns in enumerate([*shapes, *shapes[:2]])]
    order = rows[:]
    random.shuffle(order)
    values, names = stream(order, rng)
    found = join(values, names, [*rows, trajectory("not a row", [(9, 9)], rng)])
    at = 0
    for t in order:
        n = int(t.loss_mask.sum())
        assert np.array_equal(found[t.episode_id, "agent1", 0], values["divergence"][at : at + n])
        at += n
    assert len(found) == len(rows)


def test_telemetry_of_other_episodes_is_refused():
    rng = np.random.default_rng(0)
    rows = [trajectory("a", [(2, 3)], rng), trajectory("b", [(4, 3)], rng)]
    values, names = stream(rows, rng)
    with pytest.raises(OpsdError, match="of the row b/agent1/0"):
        join(values, names, rows[:1])
    with pytest.raises(OpsdError, match="of the row a/agent1/0"):
        join(values, names, [trajectory("a", [(2, 4)], rng), rows[1]])
    with pytest.raises(OpsdError, match="without the names"):
        join(values, None, rows)


# ---- what is left out -------------------------------------------------------------------------------------------------

SECRET = frozenset(
    {"assert transfer(a, b, 3) == 7", "def test_transfer():", "assert ledger.balance('cash') == pytest.approx(12.5)"}
)
LONG = "assert ledger.balance('cash') == pytest.approx(12.5)"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("nothing here", "nothing here"),
        ("def test_transfer():", "def test_transfer():"),  # one short line may be anybody's
        ("x\ndef test_transfer():\n\n    assert transfer(a, b, 3) == 7\ny", "x\n#\ny"),
        (f"x\n  {LONG}\ny", "x\n#\ny"),  # one long line is not
        (
            '{"command": "cat <<E\\ndef test_transfer():\\n    assert transfer(a, b, 3) == 7\\nE"}',
            '{"command": "cat <<E\\n#\\nE"}',
        ),
        (
            "def test_transfer():\nother\nassert transfer(a, b, 3) == 7",
            "def test_transfer():\nother\nassert transfer(a, b, 3) == 7",
        ),
    ],
)
def test_secret_lines(text, left):
    shown = re.sub(r"\[\d+ characters of a hidden test or an answer left out\]", "#", redacted(text, spans(text, SECRET)))
    assert shown == left


def test_secrets_are_the_lines_that_patches_add_and_the_task_does_not_tell(tmp_path):
    for feature, tests in (
        (1, "+def test_public():\n+    assert hidden_number == 41\n"),
        (2, "+    assert other_number == 42\n-    assert removed == 1\n"),
    ):
        folder = tmp_path / f"feature{feature}"
        folder.mkdir()
        (folder / "feature.md").write_text("def test_public():\nis what you must pass")
        (folder / "tests.patch").write_text(f"+++ b/tests/test_x.py\n{tests}")
        (folder / "feature.patch").write_text("+++ b/src/x.py\n+hidden_number = 41\n+x = 1\n")
    found = secrets_of(tmp_path, (1, 2))
    assert found.tests == {"assert hidden_number == 41", "assert other_number == 42"} and found.gold == {"hidden_number = 41"}
    with pytest.raises(OpsdError, match="does not exist"):
        secrets_of(tmp_path / "other", (1, 2))


# ---- conversations ----------------------------------------------------------------------------------------------------


def unpack(text: str):
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_quantised_divergences_are_within_five_percent():
    d = np.concatenate([[0.0], np.logspace(-6, 1, 400)])
    back = 1e-6 * (2 ** (np.array(quantise(d)) / 8) - 1)
    assert quantise(d)[0] == 0 and np.all(np.abs(back - d) <= 0.05 * d + 5e-8)


def test_what_is_not_known_and_what_is_no_number_have_codes():
    assert quantise(np.array([np.nan, np.inf, -1e-9, 1e30, 0.0])) == [-1, 319, 0, 319, 0]


@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_lengths_are_those_of_javascript(text):
    assert _units(text) == sum(1 + (ord(c) > 0xFFFF) for c in text)


def test_a_patch_of_other_bytes_is_packed():
    text = b"+x = '\xff\xc3'\n".decode("utf-8", "surrogateescape")
    _, (block,) = blocks([{"agents": [{"items": [], "patch": text}]}])
    assert unpack(block)["agents"][0]["patch"] == text


@pytest.mark.parametrize("text", ["plain text", "grüße, 你好 🎉 end", "<think>\na\n</think>", ""])
def test_pieces_are_the_text(text):
    tokenizer = chat_tokenizer()
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    decoder = Decoder(tokenizer)
    pieces = decoder.pieces(ids)
    assert "".join(pieces) == text and len(pieces) == len(ids)
    assert decoder.pieces(ids) == pieces


class Spaced:
    """A tokenizer whose tokens lose their leading space when they are decoded alone, as SentencePiece's do."""

    def decode(self, ids):
        return " ".join(f"w{i}" for i in ids)


def test_pieces_of_a_tokenizer_whose_pieces_do_not_join():
    pieces = Decoder(Spaced()).pieces(np.array([1, 2, 3], np.int32))
    assert pieces == ["w1 w2 w3"]


def episode(reply: str, kinds: dict | None = None, observation: str = "ok") -> tuple[Episode, int]:
    ids = np.array(chat_tokenizer().encode(reply, add_special_tokens=False), np.int32)
    turn = TurnRecord(
        "e",
        "agent1",
        0,
        0,
        0,
        np.zeros(5, np.int32),
        ids,
        np.zeros(len(ids), np.float32),
        "stop",
        "policy",
        Sampling(1, 1, -1, 9),
        0,
        "c",
        0.0,
        1.0,
    )
    messages = {
        "agent1": [
            {"role": "system", "content": "You are agent1."},
            {"role": "assistant", "content": reply, "extra": {"turn": 0, "timestamp": 12.5}},
            {"role": "tool", "content": observation},
            {"role": "user", "content": "[Message from agent2 — 1 new]: hello"},
            {"role": "exit", "content": "Submitted"},
        ]
    }
    agents = (AgentOutcome("agent1", 1, "Submitted", 1, "", 0, False), AgentOutcome("agent2", 2, "Submitted", 0, "", 0, False))
    return Episode(
        "e", "r", 1, (1, 2), "train", "c", "infra:x", (turn,), agents, None, kinds or {}, 0, "", 10.0, 20.0, messages
    ), len(ids)


def test_a_conversation_says_who_said_what_and_what_each_token_cost():
    e, n = episode("I write the parser.")
    d = np.linspace(0, 0.5, n).astype(np.float32)
    found = conversation(e, {("e", "agent1", 0): d}, Decoder(chat_tokenizer()), Secrets(frozenset(), frozenset()), False)
    items = found["agents"][0]["items"]
    assert [i["r"] for i in items] == ["system", "assistant", "tool", "peer"] and found["agents"][1]["items"] == []
    said = items[1]
    assert (said["t"], said["n"], said["s"], said["k"]) == ("I write the parser.", 0, 2.5, quantise(d)) and sum(
        said["c"]
    ) == len(said["t"])
    plain = conversation(e, {}, None, Secrets(frozenset(), frozenset()), False)["agents"][0]["items"][1]
    assert plain["t"] == "I write the parser." and "k" not in plain


def test_replies_that_the_harness_could_not_read_stand_where_they_were_written():
    """They are in no message, only the complaint is; one at the end has not even that."""
    e, _ = episode("turn 0")
    tokenizer = chat_tokenizer()

    def turn(i: int, kind: str) -> TurnRecord:
        ids = np.array(tokenizer.encode(f"turn {i}", add_special_tokens=False), np.int32)
        return dataclasses.replace(e.turns[0], turn=i, kind=kind, response_ids=ids, t_end=10.0 + i)

    complaint = {"role": "user", "content": "Tool call error", "extra": {"interrupt_type": "FormatError"}}
    messages = [
        {"role": "system", "content": "s"},
        complaint,
        {"role": "assistant", "content": "turn 2", "extra": {"turn": 2}},
        {"role": "tool", "content": "ok"},
        complaint,
    ]
    kinds = ("malformed", "policy", "policy", "malformed", "malformed")
    e = dataclasses.replace(e, turns=tuple(turn(i, k) for i, k in enumerate(kinds)), messages={"agent1": messages})
    d = np.arange(sum(len(t.response_ids) for t in e.turns), dtype=np.float32)
    items = conversation(e, {("e", "agent1", 0): d}, Decoder(tokenizer), Secrets(frozenset(), frozenset()), False)["agents"][0][
        "items"
    ]
    assert [i["t"] for i in items] == [
        "s",
        "turn 0",
        "Tool call error",
        "turn 1",
        "turn 2",
        "ok",
        "turn 3",
        "Tool call error",
        "turn 4",
    ]
    assert [i.get("kind") for i in items if "n" in i] == ["malformed", None, None, "malformed", "malformed"]
    assert [q for i in items if "n" in i for q in i["k"]] == quantise(d)


@pytest.mark.parametrize(
    ("kinds", "reveal", "tests_shown", "gold_shown"),
    [
        ({}, False, False, True),
        ({"agent1": "guidance"}, False, False, True),
        ({"agent1": "answer"}, False, False, False),
        ({"agent1": "answer"}, True, True, True),
    ],
)
def test_hidden_tests_are_left_out_and_answers_where_an_agent_had_them(kinds, reveal, tests_shown, gold_shown):
    """The gold patch is secret where it was told; a student that found the same line may show it."""
    gold = "return self._accounts[source].withdraw(amount)"
    e, n = episode(f"a\n{LONG}\nb\n{gold}\nc", kinds, observation=f"{LONG}\n{gold}")
    secrets = Secrets(frozenset({LONG}), frozenset({gold}))
    found = conversation(e, {("e", "agent1", 0): np.full(n, 0.1, np.float32)}, Decoder(chat_tokenizer()), secrets, reveal)
    for item in (found["agents"][0]["items"][i] for i in (1, 2)):
        assert (LONG in item["t"], gold in item["t"]) == (tests_shown, gold_shown)
    said = found["agents"][0]["items"][1]
    assert sum(said["c"]) == len(said["t"]) and len(said["c"]) == len(said["k"])


def test_texts_that_several_episodes_share_stand_once():
    shared, own = "s" * 300, "o" * 300

    def talk(text: str, name: str) -> dict:
        return {"id": name, "agents": [{"items": [{"r": "system", "t": shared}, {"r": "user", "t": text}]}]}

    common, packed = blocks([talk(own, "a"), talk("short", "b"), talk("t" * 300, "c")])
    assert unpack(common) == [shared]
    items = [unpack(b)["agents"][0]["items"] for b in packed]
    assert [i[0]["t"] for i in items] == [0, 0, 0] and [i[1]["t"] for i in items] == [own, "short", "t" * 300]


# ---- plots ------------------------------------------------------------------------------------------------------------


def test_plots_are_well_formed_and_carry_their_numbers():
    series = [plots.Series("a <b>", [(1, 0.1), (2, 0.05)], [(0.0, 0.2), (0.0, 0.1)]), plots.Series("c", [(1, 0.3)])]
    figures = [
        plots.lines(series, "nats"),
        plots.lines([plots.Series("flat", [(1, 0.0), (2, 0.0)])], "nats"),
        plots.interval(0.5, 0.237, 0.763, "5/10"),
        plots.dumbbells([("write & test", {"x": 0.118, "y": 0.062}), ("none", {"x": None, "y": None})], ["x", "y"]),
        plots.flow([("p", {"both": 2, "one": 1}), ("m", {"clean": 3})], {(0, "both", "clean"): 2, (0, "one", "clean"): 1}),
    ]
    for figure in figures:
        assert ET.fromstring(figure).tag == "svg"
    assert (
        "a &lt;b&gt;, 2: 0.05 nats" in figures[0]
        and "write &amp; test, y: 6.2%" in figures[3]
        and "one to clean: 1" in figures[4]
    )
    assert plots.lines([], "x") == plots.interval(None, None, None, "") == plots.dumbbells([], []) == plots.flow([], {}) == ""


def test_an_interval_lies_where_its_numbers_are():
    """0 is at 4, 100% at 128: of 5/10 the dot is in the middle."""
    dot = re.search(r'cx="([\d.]+)"', plots.interval(0.5, 0.25, 0.75, "x"))
    band = re.search(r'class="band" d="M([\d.]+) 7.0H([\d.]+)"', plots.interval(0.5, 0.25, 0.75, "x"))
    assert dot and band and (float(dot[1]), float(band[1]), float(band[2])) == (66.0, 35.0, 97.0)


@pytest.mark.parametrize(
    ("x", "text"),
    [(None, "-"), (0, "0"), (0.01234, "0.0123"), (1326, "1326"), (3.1e-9, "3.1e-9"), (8.95e9, "9.0e9"), (float("nan"), "-")],
)
def test_numbers(x, text):
    assert plots.number(x) == text


# ---- denominators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "of"),
    [
        ("pairs_passed", "scored pairs"),
        ("features_passed", "features of scored pairs"),
        ("action_write", "executed commands"),
        ("near_duplicate_share", "delivered sends"),
        ("patch_bytes", "agents of scored pairs"),
        ("patch_kb_per_pair", "scored pairs"),
        ("submitted", "agents of scored pairs"),
        ("same_error", "agents of scored pairs"),
        ("messages_median", "scored pairs"),
        ("message_chars", "delivered sends"),
        ("answer_rate", "questions"),
    ],
)
def test_what_a_number_is_over(key, of):
    d = DEFINITIONS[key]
    metric = BehaviourMetric(d.key, d.title, d.group, d.definition, d.unit, None, {}, False)
    assert denominator(metric) == of


def test_every_metric_is_over_something_short():
    for d in DEFINITIONS.values():
        of = denominator(BehaviourMetric(d.key, d.title, d.group, d.definition, d.unit, None, {}, False))
        assert 0 < len(of) < 80 and of not in "PAS", (d.key, of)
        assert of == "delivered sends" or not d.definition.endswith(" / S"), (d.key, of)


def test_assets_load_nothing():
    folder = Path(plots.__file__).parent
    for name in ("page.css", "page.js", "page.html.jinja"):
        text = (folder / name).read_text()
        assert not re.search(r"https?://|//[a-z]+\.|@import|url\((?!data)|\bfetch\(|XMLHttpRequest|import\(", text), name
    assert dataclasses.is_dataclass(plots.Series)
