"""The probe's numbers against plain forwards in float64, its controls, tables, refusals and report."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from probe_run import make_run

from verl_opsd.cli.main import main
from verl_opsd.cli.probe import _hints
from verl_opsd.cooperbench.pair_briefs import briefs_of, pair_elsewhere
from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import make_tiny
from verl_opsd.privilege import ChatMarkers
from verl_opsd.probe.measure import Head, depth_bucket, divergence, groups, measure, nll, spikes, summary
from verl_opsd.probe.recovery import prefixes, recover
from verl_opsd.probe.states import (
    ARMS,
    BriefChoice,
    coinciding,
    context_ids,
    passes_of_view,
    read_branches,
    split_fitting,
    view_of,
)
from verl_opsd.rundir import RunDir
from verl_opsd.teachers.device import DeviceTeacher
from verl_opsd.tokens.branches import loss_positions
from verl_opsd.tokens.store import EpisodeStore

CHOICE = BriefChoice("peer_spec")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("probe")
    student = make_tiny(folder / "student", seed=1)
    return make_run(folder / "run", student), student, make_tiny(folder / "teacher", seed=2, hidden_size=96)


@pytest.fixture(scope="module")
def tokenizer(paths):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(paths[1])


@pytest.fixture(scope="module")
def student(paths) -> DeviceTeacher:
    return DeviceTeacher(str(paths[1]), torch.float32, "cpu", "student")


@pytest.fixture(scope="module")
def teacher(paths) -> DeviceTeacher:
    return DeviceTeacher(str(paths[2]), torch.float32, "cpu", "teacher")


@pytest.fixture(scope="module")
def branches(paths, tokenizer):
    return read_branches(RunDir(paths[0]), "pocket", tokenizer)


@pytest.fixture(scope="module")
def probe(branches, student, teacher, tokenizer):
    return measure(branches, student, teacher, tokenizer, CHOICE, ARMS, ("system", "last_user"), workers=2)


def plain(path: Path, ids: list[int]) -> np.ndarray:
    """Log-probabilities [T, V] of a plain forward in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


def test_numbers_are_those_of_plain_forwards(probe, paths, tokenizer):
    """Gap, effect and pull of one branch under both placements, each turn by its own forward, placed by text and not by the code."""
    branch, n = probe.branches[1], probe.lengths[0]
    t = branch.trajectory
    brief = context_ids(branch, "brief", CHOICE, tokenizer)
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for turn in (0, 1):
        replied = np.flatnonzero(t.turn_index == turn)
        ids = t.input_ids[: replied[-1] + 1].tolist()
        ends = [i for i, x in enumerate(ids[: replied[0]]) if x == im_end]
        places = {"system": ends[0], "last_user": ends[-1]}
        p, q = plain(paths[1], ids), plain(paths[2], ids)
        rows = slice(n + int((loss_positions(t.loss_mask) < replied[0] - 1).sum()), None)
        for placement, at in places.items():
            seen = plain(paths[2], [*ids[:at], *brief, *ids[at:]])
            for k, i in enumerate((replied - 1).tolist()):
                j = i + len(brief)
                want = {
                    "gap": (p[i], q[i]),
                    f"effect/{placement}/brief": (q[i], seen[j]),
                    f"pull/{placement}/brief": (p[i], seen[j]),
                }
                for name, (a, b) in want.items():
                    assert probe.values[name][rows][k] == pytest.approx(float((np.exp(a) * (a - b)).sum()), rel=2e-3, abs=1e-6)
                assert probe.values[f"flip/{placement}/brief"][rows][k] == (q[i].argmax() != seen[j].argmax())
                assert probe.values["nll"][rows][k] == pytest.approx(-p[i][ids[i + 1]], rel=1e-4)


def test_what_actors_had_read_is_taken_out(paths, tmp_path, tokenizer, branches):
    hinted = make_run(tmp_path / "hinted", paths[1], actor_brief="shared_backlog")
    (stored,) = {t.new_ids.size for e in EpisodeStore(hinted / "episodes").episodes() for t in e.turns if t.turn == 0}
    found = read_branches(RunDir(hinted), "pocket", tokenizer, hints=_hints(RunDir(hinted)))
    for a, b in zip(found, branches, strict=True):
        assert a.name == b.name and stored > int(b.trajectory.turn_index.argmax())
        for field in ("input_ids", "loss_mask", "turn_index"):
            assert np.array_equal(getattr(a.trajectory, field), getattr(b.trajectory, field))
    other = RunDir(make_run(tmp_path / "other", paths[1], actor_brief="shared_backlog"))
    (other.path / "meta.json").write_text((paths[0] / "meta.json").read_text())
    with pytest.raises(OpsdError, match="the run that collected it gives"):
        read_branches(other, "pocket", tokenizer, hints=_hints(other))


def test_controls(probe):
    assert probe.values["identity"].max() < 1e-6 and probe.values["void"].max() < 1e-6
    assert probe.values["shifted"].mean() > 1e-2 and probe.values["gap"].mean() > 1e-2


def test_the_self_teacher_has_no_gap_and_pulls_as_far_as_its_brief(branches, student, tokenizer):
    found = measure(branches[:2], student, student, tokenizer, CHOICE, ["brief"], ["last_user"])
    assert found.values["gap"].max() == 0
    assert np.array_equal(found.values["pull/last_user/brief"], found.values["effect/last_user/brief"])
    empty = measure(branches[:2], student, student, tokenizer, BriefChoice("none"), ["brief"], ["system"])
    assert empty.values["effect/system/brief"].max() == 0


def test_arms_are_what_they_say(branches, tokenizer):
    for branch in branches:
        agent = branch.trajectory.agent_id
        ids = {arm: context_ids(branch, arm, CHOICE, tokenizer) for arm in ARMS}
        text = {arm: tokenizer.decode(i) for arm, i in ids.items()}
        assert text["brief"] == "\n\n" + briefs_of(branch.pair, "peer_spec")[agent].text
        other = pair_elsewhere(branch.pair)
        assert other.repo != branch.pair.repo and text["wrong_task"] == "\n\n" + briefs_of(other, "peer_spec")[agent].text
        assert sorted(text["shuffled"].split()) == sorted(text["brief"].split()) and text["shuffled"] != text["brief"]
        assert len(ids["content_free"]) == len(ids["brief"])
        assert not set(re.findall(r"\w{5,}", text["content_free"])) & set(
            re.findall(r"\w{5,}", branch.pair.feature_text(branch.pair.features[0]))
        )
        assert ids == {arm: context_ids(branch, arm, CHOICE, tokenizer) for arm in ARMS}
    with pytest.raises(OpsdError, match="arms are"):
        context_ids(branches[0], "noise", CHOICE, tokenizer)


def test_passes_score_every_position_once(branches, tokenizer):
    markers = ChatMarkers.from_tokenizer(tokenizer)
    for branch in branches:
        for placement in ("system", "last_user"):
            passes = passes_of_view(
                view_of(branch, context_ids(branch, "brief", CHOICE, tokenizer), placement, CHOICE, markers)
            )
            slots = torch.cat([p.slots_N for p in passes]).tolist()
            labels = torch.cat([p.ids_T[p.index_N + 1] for p in passes]).tolist()
            scored = branch.trajectory.input_ids[branch.trajectory.loss_mask == 1].tolist()
            assert sorted(slots) == list(range(len(scored))) and [scored[s] for s in slots] == labels
            assert len(passes) == (1 if placement == "system" else 2)


def test_tables_are_never_mixed_and_groups_cover_everything(probe):
    found = summary(probe)
    assert list(found["effect"]) == list(found["pull"]) == ["system", "last_user"]
    assert list(found["effect"]["system"]["arms"]) == list(ARMS) and list(found["effect"]["last_user"]["arms"]) == ["brief"]
    for family in ("effect", "pull"):
        for placement in ("system", "last_user"):
            values = probe.values[f"{family}/{placement}/brief"].astype(np.float64)
            s = found[family][placement]["arms"]["brief"]
            assert s["mean"] == pytest.approx(values.mean(), rel=1e-6) and s["max"] == values.max()
            assert s["median"] == pytest.approx(np.sort(values)[(len(values) + 1) // 2 - 1], rel=0.01)  # the sketch's accuracy
            for rows in found[family][placement]["by"].values():
                assert sum(r["n"] for r in rows.values()) == found["positions"]
                assert sum(r["n"] * r["brief"] for r in rows.values()) == pytest.approx(values.sum(), rel=1e-5)
    assert {"think", "command", "other"} <= set(groups(probe, "class")) and set(groups(probe, "turn")) == {"turn 0", "turn 1"}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_small_statistics():
    assert [depth_bucket(d) for d in (0, 511, 512, 20000, 10**6)] == ["0-512", "0-512", "512-1024", "16384-32768", ">=32768"]
    values = np.arange(300, dtype=np.float32)
    assert spikes(values) == {"tokens": 300.0, "mean": 149.5, "max": 299.0, "spike": 298.0}  # 297 298 299
    assert spikes(values[:5])["spike"] == 4.0


def test_recovery_continues_the_students_prefixes(branches, student, teacher, tokenizer):
    places = prefixes(branches, 100)
    starts = {(b.name, s) for b, s in places}
    wanted = {(b.name, int(np.flatnonzero(b.trajectory.turn_index == t)[0])) for b in branches for t in (0, 1)}
    assert starts == wanted and len(prefixes(branches, 1)) == len({depth_bucket(s) for _, s in wanted})
    rows = recover(branches, student, student, tokenizer, BriefChoice("none"), "system", per_depth=2, tokens=6)
    for row in rows:  # without a brief the student is its own teacher: greedy tokens have the least NLL that one token can have
        assert row["teacher"] == pytest.approx(row["student"]) and row["teacher"]["max"] < np.log(2048)
    other = recover(branches, student, teacher, tokenizer, CHOICE, "last_user", per_depth=2, tokens=6)
    base = copy.deepcopy(tokenizer)
    base.eos_token = "<|endoftext|>"  # as a base model has it: a turn still ends where the conversation's turns do
    assert recover(branches, student, teacher, base, CHOICE, "last_user", per_depth=2, tokens=6) == other
    assert sum(r["prefixes"] for r in other) >= 2
    assert all(r["student"]["mean"] > r["teacher"]["mean"] for r in other)
    longest = max(len(context_ids(b, "brief", CHOICE, tokenizer)) + s for b, s in places)
    fewer = dataclasses.replace(CHOICE, max_view_tokens=longest + 5)  # no room for six more behind the longest prefix
    kept = recover(branches, student, teacher, tokenizer, fewer, "system", per_depth=100, tokens=6)
    assert 0 < sum(r["prefixes"] for r in kept) < len(places)
    assert recover(branches, student, teacher, tokenizer, dataclasses.replace(CHOICE, max_view_tokens=9), "system") == []


def run(paths, out: Path, *argv: str) -> int:
    return main(["probe", str(paths[0]), "--out", str(out), "--teacher", str(paths[2]), *argv])


def test_recovery_compares_with_one_turn_of_the_student(branches, student, tokenizer):
    """A teacher that goes on as the recorded branch does, past the turn's end, agrees with the turn alone."""
    branch = branches[0]
    ids, turns = branch.trajectory.input_ids, branch.trajectory.turn_index

    class Parrot:
        def __getattr__(self, name):
            return getattr(student, name)

        def continue_greedily(self, view, count, end):
            return torch.from_numpy(ids[len(view) : len(view) + count].astype(np.int64))

    rows = recover([branch], student, Parrot(), tokenizer, BriefChoice("none"), "system", tokens=10_000)
    lengths = [int((turns == t).sum()) for t in (0, 1)]
    got = sum(r["prefixes"] * r["tokens in a row as the student"] for r in rows)
    assert got == sum(lengths) < len(ids) - int(np.argmax(turns >= 0))


def test_command(paths, tmp_path, capsys):
    evidence = paths[0] / "evidence.jsonl"
    before = len(evidence.read_text().splitlines()) if evidence.exists() else 0
    assert run(paths, tmp_path, "--episodes", "1", "--teacher-run", str(paths[0])) == 0
    lines = [json.loads(x) for x in evidence.read_text().splitlines()][before:]
    assert [(x["gate"], x["verdict"]) for x in lines] == [
        (f"probe_{g}", "pass") for g in ("identity", "void", "shifted", "conditioning")
    ]
    result = json.loads((tmp_path / "probe.json").read_text())
    assert result["episodes"] == 1 and set(result["teachability"]) == {"student's own tokens", "teacher's trajectories"}
    own, theirs = result["teachability"].values()
    assert own == pytest.approx(theirs)
    page = (tmp_path / "probe.html").read_text()
    assert not re.search(r"(src|href)=|<script", page) and page.count("<table") >= 10
    shown = re.findall(r'title="effect [^"]+">([^<]*)</span>', page)
    assert len(shown) == result["positions"] and "".join(shown).count("Done with it.") == 2


@pytest.mark.parametrize("damage", ["cut", "absent", "empty table"])
def test_a_damaged_episode_stops_the_probe_unless_it_is_left_out_by_name(paths, tmp_path, capsys, damage):
    run = Path(shutil.copytree(paths[0], tmp_path / "run", ignore=shutil.ignore_patterns("evidence*", "probe")))
    whole, broken = "train-00001-00001-0", "train-00001-00000-0"
    file = run / "episodes" / broken / ("episodes.parquet" if damage == "empty table" else "turns.parquet")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    elif damage == "absent":
        file.unlink()
    else:
        pq.write_table(pq.read_table(file).slice(0, 0), file)
    argv = ["probe", str(run), "--teacher", str(paths[2]), "--arms", "brief", "--placements", "system"]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert f"episode {broken}: {run}" in said and "--leave-out" in said
    assert main([*argv, "--leave-out", "no-such-episode"]) == 2
    assert "no-such-episode" in capsys.readouterr().err
    assert not (run / "probe").exists() and not (run / "evidence.jsonl").exists()
    assert main([*argv, "--leave-out", broken]) == 0
    result = json.loads((run / "probe" / "probe.json").read_text())
    assert result["episodes"] == 1 and result["episodes_left_out"] == [broken]
    assert all(f"left out by name: {broken}" in line for line in (run / "evidence.jsonl").read_text().splitlines())
    assert f"left out by name: {broken}" in (run / "probe" / "probe.html").read_text()
    assert main([*argv, "--leave-out", broken, "--episodes", "2"]) == 2  # as many as were asked for
    assert main(["why", str(run), whole, "1", "--teacher", str(paths[2])]) == 0  # one episode is read
    assert main(["why", str(run), broken, "1", "--teacher", str(paths[2])]) == 2


def test_an_arm_that_is_the_brief_itself_controls_nothing(paths, tmp_path, branches, tokenizer):
    """A protocol is the same whatever the task; a peer's task is not."""
    argv = ["--episodes", "1", "--placements", "system", "--arms", "brief", "wrong_task", "shuffled"]
    assert run(paths, tmp_path, "--brief", "shared_backlog", *argv) == 0
    result = json.loads((tmp_path / "probe.json").read_text())
    assert result["same_as_brief"] == {"wrong_task": result["branches"]}
    assert all(list(result[f]["system"]["arms"]) == ["brief", "shuffled"] for f in ("effect", "pull"))
    assert f"Arm wrong_task is the brief itself at {result['branches']} branches" in (tmp_path / "probe.html").read_text()
    assert coinciding(branches, ARMS, CHOICE, tokenizer) == {}
    assert coinciding(branches, ARMS, BriefChoice("none"), tokenizer) == dict.fromkeys(
        ("wrong_task", "content_free"), len(branches)
    )


@pytest.mark.parametrize("characters", [1, 7, 500])
def test_content_free_text_is_as_long_as_the_brief_for_any_tokenizer(branches, characters):
    class Phrases:
        """A token for each so many characters."""

        def encode(self, text, **kwargs):
            return [hash(text[i : i + characters]) for i in range(0, len(text), characters)]

    brief, filler = (context_ids(branches[0], arm, CHOICE, Phrases()) for arm in ("brief", "content_free"))
    assert len(filler) == len(brief) > 0


def test_gates_fail_with_the_thresholds_of_a_file(paths, tmp_path):
    file = tmp_path / "gates.json"
    good = {"identity_max": 1e-6, "void_max": 1e-6, "shifted_min": 1e-3, "conditioning_min": 1e-6}
    for key, value in (("shifted_min", 50.0), ("conditioning_min", 50.0)):
        file.write_text(json.dumps(good | {key: value}))
        assert run(paths, tmp_path, "--episodes", "1", "--arms", "brief", "--placements", "system", "--gates", str(file)) == 1
    texts = ["{", "[]", '"x"', *map(json.dumps, ({"identity_max": 1}, good | {"void_max": -1}, good | {"more": 1}))]
    texts += [json.dumps(good | {"void_max": v}) for v in (True, None, "1", float("inf"), float("nan"))]
    for broken in texts:
        file.write_text(broken)
        assert run(paths, tmp_path, "--gates", str(file)) == 2
    assert run(paths, tmp_path, "--gates", str(tmp_path / "none.json")) == 2


def test_a_brief_that_does_nothing_fails_the_conditioning_gate(paths, tmp_path):
    assert run(paths, tmp_path, "--brief", "none", "--arms", "brief", "--episodes", "1") == 1


def test_refusals(paths, tmp_path, capsys):
    assert run(paths, tmp_path, "--episodes", "3") == 2
    assert run(paths, tmp_path, "--arms", "shuffled") == 2
    assert run(paths, tmp_path, "--brief", "gold_patch") == 2
    assert main(["probe", str(tmp_path)]) == 2
    for text in ("{", "{}", '{"student": "x", "opsd": {}}'):
        (tmp_path / "meta.json").write_text(text)
        assert main(["probe", str(tmp_path)]) == 2
    for argv in (["--episodes", "0"], ["--episodes", "-1"], ["--episodes", "x"]):
        with pytest.raises(SystemExit):
            run(paths, tmp_path, *argv)
    with pytest.raises(SystemExit):
        main(["why", str(paths[0]), "train-00001-00000-0", "1", "--tokens", "-2"])
    assert main(["why", str(paths[0]), "no-such-episode", "0"]) == 2
    assert main(["why", str(paths[0]), "train-00001-00000-0", "9"]) == 2
    assert "turns with loss there: [0, 1]" in capsys.readouterr().err
    assert main(["why", str(paths[0]), "train-00001-00000-0", "0", "--agent", "agent9"]) == 2
    assert "agents with loss there: agent1, agent2" in capsys.readouterr().err


def test_other_models_and_what_is_none_are_refused(paths, tmp_path, capsys):
    """A teacher that reads or ends replies in another way would be measured at other places."""
    other = tmp_path / "other"
    shutil.copytree(paths[2], other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>assistant", "<|im_start|>model"))
    wide = make_tiny(tmp_path / "wide", seed=3)
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    for argv, said in (
        (["--teacher", str(other)], "has other generation prefix"),
        (["--student", str(other)], "has other generation prefix"),
        (["--teacher", str(wide)], "vocabulary rows"),
        (["--teacher", str(tmp_path / "none")], "config.json"),
        (["--adapter", str(tmp_path)], "adapter_config.json"),
        (["--device", "abacus"], "--device abacus"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--files", str(tmp_path)], "with brief peer_spec"),
    ):
        assert main(["probe", str(paths[0]), "--out", str(tmp_path / "out"), *argv]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_teachers_run_of_another_tokenizer_is_refused(paths, tmp_path, capsys):
    """Its ids would be other words to the student, and their likelihood no teachability."""
    theirs = tmp_path / "theirs"
    shutil.copytree(paths[0], theirs)
    other = tmp_path / "other"
    shutil.copytree(paths[2], other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    a, b = sorted(k for k in tokenizer["model"]["vocab"] if k.isalpha() and k.isascii())[:2]
    vocab = tokenizer["model"]["vocab"]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    meta = json.loads((theirs / "meta.json").read_text())
    for student, said in ((str(other), "has another tokenizer than the student (2 entries"), (None, "meta.json")):
        (theirs / "meta.json").write_text(json.dumps(meta | {"student": student}))
        assert run(paths, tmp_path / "out", "--teacher-run", str(theirs)) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_branches_that_can_not_be_probed_are_left_out_and_counted(paths, tmp_path, branches, student, tokenizer):
    edited = [dataclasses.replace(b, patch="--- a/x.py\n+++ b/x.py\n@@ -1 +1,2 @@\n a\n+b = 1\n") for b in branches[:1]]
    hindsight = BriefChoice("hindsight_gold", allow_answer=True)
    kept, out = split_fitting([*edited, *branches[1:]], hindsight, ["brief"], ["system"], tokenizer, None)
    assert kept == edited and out == {"no brief": len(branches) - 1, "view too long": 0}
    sizes = [len(b.trajectory.input_ids) + len(context_ids(b, "brief", CHOICE, tokenizer)) for b in branches]
    assert len(set(sizes)) > 1
    limited = dataclasses.replace(CHOICE, max_view_tokens=max(sizes) - 1)
    kept, out = split_fitting(branches, limited, ["brief"], ["system"], tokenizer, None)
    assert [len(b.trajectory.input_ids) for b in kept] == [
        len(b.trajectory.input_ids) for b, n in zip(branches, sizes, strict=True) if n < max(sizes)
    ]
    assert out == {"no brief": 0, "view too long": sizes.count(max(sizes))}
    windowed = dataclasses.replace(limited, window_context=1)
    assert split_fitting(branches, windowed, ["brief"], ["system"], tokenizer, None)[1]["view too long"] == 0
    longest = branches[sizes.index(max(sizes))]
    found = measure([longest], student, student, tokenizer, windowed, ["brief"], ["system"])
    assert np.isfinite(found.values["effect/system/brief"]).all() and found.lengths == (longest.trajectory.loss_mask.sum(),)
    with pytest.raises(OpsdError, match="view too long"):
        split_fitting(branches, CHOICE, ["brief"], ["system"], tokenizer, 3)
    meta = json.loads((paths[0] / "meta.json").read_text())
    meta["opsd"]["brief"]["max_view_tokens"] = max(sizes) - 1
    shutil.copytree(paths[0] / "episodes", tmp_path / "run/episodes")
    (tmp_path / "run/meta.json").write_text(json.dumps(meta))
    assert main(["probe", str(tmp_path / "run"), "--arms", "brief", "--placements", "system"]) == 0
    said = f"{sizes.count(max(sizes))} view too long"
    assert said in (tmp_path / "run/probe/probe.html").read_text()
    lines = [json.loads(x) for x in (tmp_path / "run/evidence.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and all(f"{sizes.count(max(sizes))} branches left out: view too long" in x["detail"] for x in lines)


def test_answers_are_not_in_what_a_probe_writes(paths, tmp_path, branches):
    assert run(paths, tmp_path, "--brief", "gold_patch", "--allow-answer", "--episodes", "1", "--arms", "brief") == 0
    text = (tmp_path / "probe.json").read_text() + (tmp_path / "probe.html").read_text()
    gold = briefs_of(branches[0].pair, "gold_patch", allow_answer=True)["agent1"].text
    assert not [line for line in gold.splitlines() if len(line.strip()) > 20 and line.strip() in text]


def test_why_shows_three_distributions_that_the_models_have(paths, tokenizer, branches, monkeypatch, capsys):
    from verl_opsd.probe.why import why

    student = DeviceTeacher(str(paths[1]), torch.float32, "cpu", "s")
    teacher = DeviceTeacher(str(paths[2]), torch.float32, "cpu", "t")
    rows = why(branches, "train-00001-00000-0", "agent1", 1, student, teacher, tokenizer, CHOICE, "system", 3)
    ids = branches[0].trajectory.input_ids.tolist()
    for row in rows:
        logp = plain(paths[1], ids[: row["position"]])[-1]
        best = np.argsort(logp)[::-1][:5]
        assert row["written"] == tokenizer.decode([ids[row["position"]]])
        assert [text for text, _ in row["student"]] == [tokenizer.decode([i]) for i in best.tolist()]
        assert [p for _, p in row["student"]] == pytest.approx(np.exp(logp[best]), rel=1e-3)
        assert row["student"] != row["teacher"] != row["briefed"]
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["why", str(paths[0]), "train-00001-00000-0", "1", "--teacher", str(paths[2])]) == 0
    assert "teacher with brief" in capsys.readouterr().out
    odd = [(text, 0.2) for text in ("[i]", "[/i]", "[red]", "\\[x]", "[/]")]
    row = {"position": 1, "written": "[b]", "effect": 0.0, "pull": 0.0} | dict.fromkeys(("student", "teacher", "briefed"), odd)
    monkeypatch.setattr("verl_opsd.probe.why.why", lambda *a: [row])
    assert main(["why", str(paths[0]), "train-00001-00000-0", "1"]) == 0
    out = capsys.readouterr().out
    assert "'[b]'" in out and all(out.count(repr(text)) == 3 for text, _ in odd)


def test_turns_without_loss_are_named_not_shown_as_an_empty_table(paths, tokenizer, branches, student, teacher):
    from verl_opsd.probe.why import why

    t = branches[0].trajectory
    mask = np.where(t.turn_index == 0, 0, t.loss_mask).astype(np.int8)
    silent = [dataclasses.replace(branches[0], trajectory=dataclasses.replace(t, loss_mask=mask))]
    for some, turn, known in ((branches, -1, [0, 1]), (silent, 0, [1])):
        with pytest.raises(OpsdError, match=re.escape(f"turns with loss there: {known}")):
            why(some, t.episode_id, t.agent_id, turn, student, teacher, tokenizer, CHOICE, "system", 3)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_positions_without_a_finite_distribution_are_refused(student, odd):
    """Of 4 positions one is none: the mean over the others would pass the identity gate."""
    hidden = torch.ones(4, student.weight_VH.shape[1])
    head, whole = Head(student, hidden.index_put((torch.tensor(2), torch.tensor(0)), torch.tensor(odd))), Head(student, hidden)
    for look in (lambda: divergence(head, whole), lambda: divergence(whole, head), lambda: nll(head, np.zeros(4, np.int64))):
        with pytest.raises(OpsdError, match="model student: logits that are not finite at 1 of 4 positions"):
            look()


def test_a_model_that_breaks_at_some_states_fails_the_command(paths, tmp_path, monkeypatch, capsys):
    score = DeviceTeacher.score

    def breaks(self, passes, forwards=None):
        found = score(self, passes, forwards)
        if self.name == "teacher":
            found.hidden_NH[0] = torch.nan
        return found

    monkeypatch.setattr(DeviceTeacher, "score", breaks)
    assert run(paths, tmp_path, "--episodes", "1", "--arms", "brief", "--placements", "system") == 2
    assert "model teacher: logits that are not finite" in capsys.readouterr().err
