"""The command `opsd behaviour` on a folder of the harness' logs and on a run directory."""

import dataclasses
import json
from io import StringIO

import pytest
from rich.console import Console
from synthetic import write_logs
from test_behaviour import first, second

from verl_opsd.cli.main import main, parser
from verl_opsd.contract import EvalContract
from verl_opsd.rundir import write_json
from verl_opsd.tokens.store import EpisodeStore


@pytest.fixture
def runs(tmp_path):
    write_logs(tmp_path / "logs", "run", first())
    store = EpisodeStore(tmp_path / "ours" / "episodes")
    store.write(first())
    store.write(dataclasses.replace(second(), split="train"))
    return tmp_path


def test_logs_and_run_directories_side_by_side(runs, capsys):
    out = runs / "b.json"
    code = main(
        [
            "behaviour",
            f"theirs={runs / 'logs'}",
            str(runs / "ours"),
            "--base",
            "theirs",
            "--teacher",
            "ours",
            "--json",
            str(out),
        ]
    )
    text = capsys.readouterr().out
    assert code == 0 and "near-duplicates" in text and "20.0% (1/5)" in text and "definitions version" in text
    table = json.loads(out.read_text())
    assert table["models"] == ["theirs", "ours"] and table["pairs"] == {"theirs": 1, "ours": 1}
    assert all(m["constant"] for m in table["metrics"])  # the same episode twice


def test_every_row_of_the_terminal_shows_its_own_value(runs):
    """Against the table's data: of two models, in every group."""
    out, shown = runs / "b.json", Console(width=300, file=StringIO())
    args = parser().parse_args(["behaviour", f"theirs={runs / 'logs'}", str(runs / "ours"), "--json", str(out)])
    assert args.func(args, shown) == 0
    cells = [[c.strip() for c in line.split("│")[1:-1]] for line in shown.file.getvalue().splitlines() if line.startswith("│")]
    rows = {c[0]: c[2:4] for c in cells if len(c) == 5 and not c[0].isdigit()}
    metrics = json.loads(out.read_text())["metrics"]
    assert len(metrics) > 50
    for m in metrics:
        title = m["title"] + ("" if m["unit"] == "share" else f" ({m['unit']})")
        for text, v in zip(rows[title], m["values"].values(), strict=True):
            if v["value"] is None:
                assert text == f"- of {v['denominator']}", title
            elif m["unit"] == "share":
                assert text == f"{100 * v['numerator'] / v['denominator']:.1f}% ({v['numerator']:g}/{v['denominator']})", title
            else:
                assert float(text.split()[0]) == pytest.approx(v["value"], rel=1e-3), title


def test_drift_is_not_measured_across_contracts(runs, capsys):
    """But for a field that is declared; runs that only stand side by side are told apart by their contract."""
    store = EpisodeStore(runs / "longer" / "episodes")
    contracts = {"ours": EvalContract(sandbox="process"), "longer": EvalContract(sandbox="process", step_limit=500)}
    store.write(dataclasses.replace(first(), contract_hash=contracts["longer"].hash))
    for name, contract in contracts.items():
        write_json(runs / name / "contract.json", contract.as_dict())
    command = ["behaviour", str(runs / "ours"), str(runs / "longer")]
    both = ["--base", "ours", "--teacher", "longer"]
    assert main([*command, *both]) == 2 and "step_limit" in capsys.readouterr().err
    assert main([*command, *both, "--varies", "step_limit"]) == 0
    assert main([*command, "--varies", "step_limit"]) == 2
    capsys.readouterr()
    assert main(command) == 0 and f"contract {contracts['longer'].hash[:12]}" in capsys.readouterr().out


def test_definitions_and_the_training_split_on_demand(runs, capsys):
    assert main(["behaviour", str(runs / "ours"), "--split", "train", "--definitions"]) == 0
    assert "agents whose patch is" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [["nowhere"], [".", "--base", "x"]])
def test_bad_input_names_the_rule(runs, arguments, capsys, monkeypatch):
    monkeypatch.chdir(runs / "logs")
    assert main(["behaviour", *arguments]) == 2
    assert "rule:" in capsys.readouterr().err
