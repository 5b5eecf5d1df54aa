"""The documentation says what is there: commands, keys, options, gates, faults, links and examples are checked.

``docs_commands.tsv`` lists every shell command of the pages: the file that runs it, or ``composed: reason`` (its configuration is
composed and checked here, the run is not made), or ``not run: reason``.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "examples/README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").glob("*/README.md")),
]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
TABLE = dict(line.split("\t") for line in (ROOT / "tests/unit/docs_commands.tsv").read_text().splitlines())


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(page, text) of every fenced block of a language."""
    for page, text in TEXTS.items():
        for block in re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield page, block


def commands() -> list[str]:
    """Every command of the bash blocks, on one line and without comment, each once."""
    found: dict[str, None] = {}
    for _, block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if command := " ".join(line.split(" #")[0].split()):
                found[command] = None
    return list(found)


TRAINING = [c for c in commands() if "verl.trainer.main_ppo" in c]


@pytest.fixture(scope="module")
def compose() -> Iterator:
    """Composes a training command as verl's entry point does."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["test", "+recipe=opd"])
        patch.setenv("OPSD_RUN_DIR", "/run")
        patch.setenv("OPSD_RAY_TMP", "/ray")
        patch.syspath_prepend(str(ROOT / "examples"))
        import verl  # noqa: F401

        with initialize_config_module("verl.trainer.config", version_base=None):
            yield lambda overrides, trainer="ppo_trainer": hydra_compose(trainer, overrides)


def overrides_of(command: str) -> list[str]:
    """Overrides of a training command; of a sweep the first value of each."""
    words = shlex.split(command.split("verl.trainer.main_ppo", 1)[1])
    sweep = "-m" in words or " -m +recipe" in command
    return [w.split(",")[0] if sweep else w for w in words if "=" in w]


def test_every_command_is_run_somewhere_or_says_why_not() -> None:
    assert sorted(commands()) == sorted(TABLE)
    for command, where in TABLE.items():
        how, _, reason = where.partition(": ")
        assert (ROOT / where).exists() or (how in ("composed", "not run") and len(reason) > 5), f"{command}: {where}"
        assert how != "composed" or command in TRAINING


@pytest.mark.parametrize("command", TRAINING)
def test_training_commands_compose_and_are_not_refused(command: str, compose) -> None:
    from verl_opsd.privilege import make_brief
    from verl_opsd.verl_adapter.launch import parse

    if modules := re.search(r"VERL_USE_EXTERNAL_MODULES=(\S+)", command):
        for module in modules[1].split(","):
            importlib.import_module(module)
    opsd = parse(compose(overrides_of(command)))
    if opsd.brief.files is None:
        assert make_brief(opsd.brief.name, "agent1", {"agent2": "task"}).name == opsd.brief.name


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("opsd ")])
def test_options_of_the_command_line_exist(command: str) -> None:
    from verl_opsd.cli.main import parser

    assert callable(parser().parse_args(shlex.split(command)[1:]).func)


def known(config: DictConfig, key: str) -> bool:
    """Whether a dotted key is in the composed config; below a null group, in the class of the group."""
    from verl_opsd.config import GateConfig, ThresholdConfig

    parent, _, last = key.rpartition(".")
    nullable = {
        "opsd.loss.gate": GateConfig,
        "opsd.loss.threshold": ThresholdConfig,
    }
    if parent in nullable:
        return last in nullable[parent].__dataclass_fields__
    node = OmegaConf.select(config, parent) if parent else config
    return isinstance(node, DictConfig) and last in node


def test_keys_that_are_named_exist(compose) -> None:
    online = compose(["+recipe=opd"])
    supervised = compose(["+recipe=warm_start", "curriculum=two_phase", "sft_scale=local"], "sft_trainer_engine")
    for page, text in TEXTS.items():
        configs = [online, supervised] if "warm_start" in page else [online]  # collecting is a run of the other trainer
        starts = "|".join(re.escape(str(k)) for config in configs for k in config)
        code = "\n".join(re.findall(r"`([^`\n]+)`", text))
        for key in set(re.findall(rf"(?<![\w./+])((?:{starts})(?:\.\w+)+)(?![\w/*(-])", code)):
            assert any(known(config, key) for config in configs), f"{page}: {key}"


def test_choices_of_groups_exist() -> None:
    text = TEXTS["docs/quickstart.md"]
    rows = dict(re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+)", text, re.MULTILINE))
    groups = {"scale", "tasks", "brief", "teacher", "loss", "contract"}
    assert groups <= set(rows)
    for group in groups:
        files = {p.stem for p in (ROOT / "hydra_conf" / group).glob("*.yaml") if not p.stem.startswith("_")}
        assert set(re.findall(r"`(\w+)`", rows[group])) == files, group


def names_in_source(callers: set[str]) -> set[str]:
    """First arguments of calls of these names; of an f-string its constant start."""
    names = set()
    for path in (ROOT / "verl_opsd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if called in callers and isinstance(first, ast.Constant) and isinstance(first.value, str):
                names.add(first.value)
    return names


def test_gates_are_those_of_the_source() -> None:
    start_up = {f"startup:{name}" for name in names_in_source({"_check"})}
    gates = names_in_source({"require", "evidence"}) - {"startup:"} | {"adapter_bound", "full_bound"}
    column = re.findall(r"^\| (`[^|]+) \|", TEXTS["docs/gates.md"], re.MULTILINE)
    assert {name for cell in column for name in re.findall(r"`([^`]+)`", cell)} == start_up | gates


def test_faults_are_those_of_the_source() -> None:
    from verl_opsd.cooperbench.faults import GRADING_FAULTS

    raised = (
        names_in_source({"InfraFault", "grading_fault"})
        | {"sandbox_died", "sandbox_unreachable", "engine_died"}
        | set(GRADING_FAULTS)
        | {"message_store", "harness_bug"}
        | {"endpoint_died", "endpoint_refused", "endpoint_bad_reply"}
    )
    column = re.findall(r"^\| (`[^|]+) \|", TEXTS["docs/faults.md"], re.MULTILINE)
    told = {name.split("<")[0] for cell in column for name in re.findall(r"`([^`]+)`", cell)}
    assert told == {name if ":" not in name else name[: name.index(":") + 1] for name in raised}


def test_contract_table_is_the_configuration() -> None:
    folder = ROOT / "hydra_conf" / "contract"
    base = yaml.safe_load((folder / "_base.yaml").read_text())
    rows = {}
    for line in TEXTS["docs/contract.md"].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].startswith("`") and cells[0] != "`field`":
            rows[cells[0].strip("`")] = cells[2:]
    assert list(rows) == list(base)
    for column, names in enumerate((["_base"], ["local"], ["smollm"], ["gpu1", "gpu2", "gpu8"])):
        for name in names:
            values = base | yaml.safe_load((folder / f"{name}.yaml").read_text())
            for field, cells in rows.items():
                told = yaml.safe_load(cells[column] or cells[0])
                assert told == values[field], f"{name}: {field}"


@pytest.mark.parametrize("page", TEXTS)
def test_examples_in_pages(page: str) -> None:
    parsed = doctest.DocTestParser().get_doctest(TEXTS[page], {}, page, page, 0)
    runner = doctest.DocTestRunner()
    runner.run(parsed)
    assert runner.failures == 0
    for where, block in blocks("python"):
        if where == page and ">>>" not in block:
            compile(block, page, "exec")


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", TEXTS)
def test_links_resolve(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(file.read_text()), f"{page}: {target}"


@pytest.mark.parametrize("page", TEXTS)
def test_nothing_of_a_machine(page: str) -> None:
    words = ["/wo" + "rk", "/ro" + "ot", "py" + "pi.org", "python" + "hosted", "index" + "-url", "find" + "-links"]
    assert not [word for word in words if word in TEXTS[page]]


@pytest.mark.parametrize("page", [p for p, text in TEXTS.items() if "<!-- /" in text])
def test_generated_tables_are_filled(page: str) -> None:
    for name, inside in re.findall(r"<!-- ([a-z]+:\w+) -->\n(.*?)<!-- /", TEXTS[page], re.DOTALL):
        wanted = "```text" if name.startswith("demo:") else "|---|"
        assert wanted in inside, f"{page}: {name}"
