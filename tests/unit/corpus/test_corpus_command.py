"""``opsd corpus``: recorded runs and chat files become corpora that are checked and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_tokenizer import chat_tokenizer
from jinja2 import TemplateError
from recorded import TOOLS, Builder, call, rendering
from rich.console import Console

from verl_opsd.cli.main import main, parser
from verl_opsd.corpus.records import MANIFEST, read_manifest, read_rows
from verl_opsd.corpus.rendered import rows_of_file
from verl_opsd.corpus.select import no_hints
from verl_opsd.errors import OpsdError


def chat(*replies: str, task: str = "Do it.") -> dict:
    messages: list[dict] = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": task}]
    for text in replies:
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    return {"messages": messages, "tools": TOOLS}


def rows(path: Path):
    tokenizer = chat_tokenizer()
    return rows_of_file(
        path,
        rendering(),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        lambda messages, tools: tokenizer.apply_chat_template(messages, tools=tools, tokenize=False),
    )


@pytest.fixture(autouse=True)
def adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' tokenizer in place of a model folder's."""
    import verl_opsd.verl_adapter.rendering as module

    monkeypatch.setattr(module, "rendering_of", lambda model, tools: rendering())
    monkeypatch.setattr(module, "harness_tools", lambda: TOOLS)
    monkeypatch.setattr(module, "hints_of_run", lambda run, model: no_hints)
    monkeypatch.setattr(module, "chat_rows", lambda path, model, r: rows(path))


def opsd(*words: str) -> tuple[int, str]:
    args = parser().parse_args(["corpus", *words])
    console = Console(record=True, width=160)
    return args.func(args, console), console.export_text()


@pytest.fixture
def recorded(run_with_model: Path, tmp_path: Path) -> Path:
    assert opsd("build", str(run_with_model), "--out", str(tmp_path / "corpus"), "--eval", "pocket_eval")[0] == 0
    return tmp_path / "corpus"


@pytest.fixture
def run_with_model(run: Path) -> Path:
    (run / "meta.json").write_text(json.dumps({"student": "model"}))
    return run


def test_a_recorded_corpus_is_built_checked_and_shown(recorded, run_with_model):
    code, text = opsd("check", str(recorded))
    assert code == 0 and text.count(" pass ") == 15
    assert "3 of 2 episodes" in opsd("show", str(recorded))[1]
    manifest = read_manifest(recorded)
    assert manifest["spec"]["near_duplicate"] == 0.9 and manifest["model"] == "model"
    manifest["composition"]["loss_tokens"] += 1
    (recorded / MANIFEST).write_text(json.dumps(manifest))
    code, text = opsd("check", str(recorded), "--without-sources")
    assert code == 1 and "fail" in text and "not run" in text


def test_a_chat_file_is_rendered_checked_and_marked(tmp_path):
    file = tmp_path / "chats.jsonl"
    lines = [
        chat("I look at the tree.", call("ls")),
        chat("It is done é.", task="Say it."),
        chat("It is done é.", task="Again."),
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    code, text = opsd("render", str(file), "--model", "model", "--out", str(tmp_path / "c"), "--eval", "pocket_eval")
    assert code == 0 and "near_duplicate 1" in text
    found = read_rows(tmp_path / "c" / "train.parquet")
    assert [(r.origin, r.contract_hash, r.episode_id) for r in found] == [
        ("rendered", "", "000000"),
        ("rendered", "", "000001"),
    ]
    tokenizer = chat_tokenizer()
    assert (
        tokenizer.decode(found[0].input_ids[found[0].loss_mask == 1]) == f"I look at the tree.<|im_end|>{call('ls')}<|im_end|>"
    )
    whole = tokenizer.apply_chat_template(lines[0]["messages"][:-1], tools=TOOLS, tokenize=False)
    assert tokenizer.decode(found[0].input_ids) == whole.rstrip("\n")
    assert opsd("check", str(tmp_path / "c"))[0] == 0
    assert read_manifest(tmp_path / "c")["sources"][0]["step"] == "render-1"
    file.write_text("\n".join(map(json.dumps, [chat("Another text.", call("ls")), *lines[1:]])))
    code, text = opsd("check", str(tmp_path / "c"))
    assert code == 1 and "rendered_again" in text


def test_evaluated_text_in_a_chat_file_is_left_out(tmp_path):
    from verl_opsd.cooperbench.dataset import POCKET_DIR

    task = (POCKET_DIR / "pocket_inifile_task" / "task1" / "feature2" / "feature.md").read_text()
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, [chat("Yes, I do it.", task=task), chat("Something else.")])))
    text = opsd("render", str(file), "--model", "m", "--out", str(tmp_path / "c"), "--eval", "pocket_eval")[1]
    assert "contaminated 1" in text and len(read_rows(tmp_path / "c" / "train.parquet")) == 1


U, A = '{"role": "user", "content": "u"}', '{"role": "assistant", "content": "a"}'


def calling(arguments: str) -> str:
    """A line with one call, whose arguments are this JSON."""
    call = f'{{"type": "function", "function": {{"name": "bash", "arguments": {arguments}}}}}'
    return f'{{"messages": [{U}, {{"role": "assistant", "tool_calls": [{call}]}}]}}'


@pytest.mark.parametrize("arguments", ['{"command": "ls"}', json.dumps('{"command": "ls"}')])
def test_arguments_are_an_object_or_its_json(arguments, tmp_path):
    (tmp_path / "x.jsonl").write_text(calling(arguments) + "\n")
    (row,) = rows(tmp_path / "x.jsonl")
    assert chat_tokenizer().decode(row.input_ids[row.loss_mask == 1]) == call("ls") + "<|im_end|>"


def test_a_line_of_the_file_ends_at_a_line_feed_alone(tmp_path):
    """U+2028 and the like are line breaks for Python, and plain characters for JSON."""
    texts = ["a\u2028b", "a\u0085b", "c"]
    lines = [json.dumps({"messages": [json.loads(U), {"role": "assistant", "content": t}]}, ensure_ascii=False) for t in texts]
    (tmp_path / "x.jsonl").write_bytes("\r\n".join(lines).encode())
    found = [chat_tokenizer().decode(r.input_ids[r.loss_mask == 1]) for r in rows(tmp_path / "x.jsonl")]
    assert found == [f"{t}<|im_end|>" for t in texts]


def test_what_the_template_refuses_names_the_line(tmp_path, monkeypatch):
    def refuse(self, messages, tools):
        raise TemplateError("No user query found in messages.")

    (tmp_path / "x.jsonl").write_text(json.dumps(chat("One.")))
    monkeypatch.setattr(Builder, "initial", refuse)
    with pytest.raises(OpsdError, match="line 1: No user query"):
        rows(tmp_path / "x.jsonl")
    with pytest.raises(OpsdError, match="No such file"):
        rows(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "line 1"),
        ("null", "line 1"),
        ("[1]", "line 1"),
        ("", "is empty"),
        (f'{{"messages": [{U}, {A}]}}\n\n', "line 2"),
        ('{"text": "x"}', "messages: Field required"),
        (f'{{"messages": [{U}, {A}], "tols": []}}', "tols"),
        (f'{{"messages": [{U}, {A}], "tools": "bash"}}', "tools"),
        (f'{{"messages": [{U}, {A}], "tools": [{{"type": "function", "function": {{}}}}]}}', "tools.0"),
        ('{"messages": "x"}', "messages"),
        ('{"messages": [{"content": "x"}]}', "messages.0.role"),
        (f'{{"messages": [{U}, {{"role": "assistant", "content": [{{"type": "text", "text": "a"}}]}}]}}', "messages.1.content"),
        # what no template writes would be lost, or trained on against its author's will
        (f'{{"messages": [{U}, {{"role": "assistant", "content": "a", "weight": 0}}]}}', "messages.1.weight"),
        (f'{{"messages": [{U}, {{"role": "assistant", "content": "a", "reasoning_content": "b"}}]}}', "reasoning_content"),
        (f'{{"messages": [{U}, {{"role": "assistant", "tool_calls": [{{"name": "bash"}}]}}]}}', "tool_calls.0.function"),
        (calling('"{oops"'), "arguments"),
        (calling('"[1]"'), "arguments"),
        (calling("3"), "arguments"),
        # a turn's end inside a text would be read as one
        (f'{{"messages": [{U}, {{"role": "assistant", "content": "a<|im_end|>b"}}]}}', "role assistant holds"),
        (f'{{"messages": [{{"role": "user", "content": "<|im_end|>"}}, {A}]}}', "role user holds"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "an assistant answers"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "an assistant answers"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "messages.0.role"),
    ],
)
def test_lines_that_are_refused(line, what, tmp_path):
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(OpsdError, match=what):
        rows(tmp_path / "x.jsonl")


def test_a_rendering_that_is_not_the_whole_conversations_is_refused(tmp_path, monkeypatch):
    (tmp_path / "x.jsonl").write_text(json.dumps(chat("One.", "Two.")))
    original = Builder.extend
    monkeypatch.setattr(Builder, "extend", lambda self, *args: [*original(self, *args), 70])
    with pytest.raises(OpsdError, match=r"gate rendered_again"):
        rows(tmp_path / "x.jsonl")


def test_bad_input_ends_with_code_2(tmp_path, capsys):
    assert main(["corpus", "build", str(tmp_path), "--out", str(tmp_path / "c"), "--eval", "pocket_eval"]) == 2
    assert "holds no meta.json" in capsys.readouterr().err
    assert main(["corpus", "show", str(tmp_path)]) == 2
    assert "holds no corpus.json" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["evaluation", "sources", "composition", "spec", "model", "contract", "contract_hashes"])
def test_a_manifest_that_was_taken_apart_is_no_bug(key, recorded, capsys):
    text = (recorded / MANIFEST).read_text()
    for value in (None, [], {}, [None], {"a": None}, 3):
        (recorded / MANIFEST).write_text(json.dumps(json.loads(text) | {key: value}))
        assert main(["corpus", "check", "--without-sources", str(recorded)]) in (1, 2), value
        assert main(["corpus", "show", str(recorded)]) == 2
        assert "gate manifest" in capsys.readouterr().err
