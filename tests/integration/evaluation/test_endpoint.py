"""`opsd eval` against an OpenAI-compatible server on the loopback interface that answers from a script."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from verl_opsd.cli.main import main
from verl_opsd.tokens.store import EpisodeStore

MANIFEST = {
    "engine": "script 1",
    "layout": "one process",
    "dtype": "none",
    "tool_parser": "hermes",
    "reasoning_parser": "think_tags",
    "context_length": 12288,
    "max_num_seqs": 8,
    "parameters": 9,
    "prices": [1.0, 10.0],
}


class Script(ThreadingHTTPServer):
    """Every agent says one thing and submits; ``broken`` calls in the beginning get a server error."""

    daemon_threads = True
    broken = 0
    calls = 0
    as_text = False
    refused = False  # the first reply of an agent is one that the harness refuses
    usage = True
    lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Script

    def log_message(self, *args):
        pass

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, {"data": [{"id": "scripted", "max_model_len": 12288}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.calls += 1
            broken = 1 < self.server.calls <= 1 + self.server.broken  # the warm-up is answered
        if broken:
            return self.answer(500, {"error": "down"})
        assert asked["model"] == "scripted" and asked["temperature"] == 1.0 and asked["tools"]
        turn = sum(m["role"] == "assistant" for m in asked["messages"])
        command = "ls" if turn == 0 else "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        call = {
            "id": f"c{turn}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"command": command})},
        }
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        warm_up = "echo ready" in str(asked["messages"])
        if self.server.refused and not warm_up and "Tool call error" not in str(asked["messages"]):
            message = {"role": "assistant", "content": "no call"}
        if self.server.as_text:
            message = {"role": "assistant", "content": '<tool_call>{"name": "bash"}</tool_call>'}
        usage = {"prompt_tokens": 100, "completion_tokens": 5} if self.server.usage else None
        self.answer(200, {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage})


@pytest.fixture
def server():
    with Script(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture
def arguments(server, tmp_path):
    (tmp_path / "subset.json").write_text(
        json.dumps({"tasks": [{"repo": "pocket_textkit_task", "task_id": 0, "pairs": [[1, 2]]}]})
    )
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump(MANIFEST))
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    subset = str(tmp_path / "subset.json")
    return ["eval", str(tmp_path / "run"), "--endpoint", url, "--model", "scripted", "--subset", subset], tmp_path


@pytest.mark.slow
def test_a_pair_runs_is_graded_and_is_not_run_twice(arguments, server, capsys):
    command, tmp = arguments
    server.refused = True
    verified = [*command, "--no-alone", "--manifest", str(tmp / "manifest.yaml")]
    assert main(verified) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "planned 1, ran 1, scored 1, void 0: features 0/2" in text and "cannot be shown with this design" in text
    page = (tmp / "run" / "report.html").read_text()
    assert "eval: scripted evaluated" in page and "taught by" not in page and "Replies are shown as" not in page
    assert json.loads((tmp / "run" / "report.json").read_text())["standings"]["eval"]["features"]["total"] == 2
    assert main(["report", "--compare", str(tmp / "run"), str(shutil.copytree(tmp / "run", tmp / "b")), "--out", str(tmp)]) == 0
    said = json.loads((tmp / "run" / "evaluation.json").read_text())
    assert said["parameters"] == 9 and said["serving"]["engine"] == "script 1"
    calls = server.calls
    assert main(verified) == 0 and server.calls == calls + 1  # the warm-up
    out = tmp / "s.json"
    assert main(["standings", str(tmp / "run"), "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["standings"]
    (episode,) = EpisodeStore(tmp / "run" / "episodes").episodes()
    malformed = [m for h in episode.messages.values() for m in h if m.get("extra", {}).get("interrupt_type") == "FormatError"]
    assert len(malformed) == 2  # one an agent; their replies stand in no history, and count
    # nudges after a submission without a pull request ask for further calls: 100 and 5 tokens each, at 1 and 10 a million
    n = calls - 1
    assert (row["prompt_tokens_per_pair"], row["policy_tokens_per_pair"]) == (100 * n, 5 * n)
    assert row["cost_per_pair"] == pytest.approx(n * 150 / 1e6)
    assert main([*verified, "--set", "step_limit=3"]) == 2 and "step_limit" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fault_runs_again_and_no_manifest_is_said(arguments, server, capsys, monkeypatch):
    monkeypatch.setattr("verl_opsd.evaluation.endpoint.PAUSES_S", (0.0,))
    monkeypatch.setattr("verl_opsd.evaluation.endpoint.EndpointSession.__init__.__defaults__", ((0.0,),))
    server.broken = 2
    command, tmp = arguments
    assert main([*command, "--no-alone"]) == 0
    assert "unverified" in capsys.readouterr().out
    faults = [json.loads(x) for x in (tmp / "run" / "faults.jsonl").read_text().splitlines()]
    assert {f["outcome"] for f in faults} == {"infra:endpoint_died"} and len(faults) <= 2


def test_what_would_measure_the_server_is_refused_before_a_pair(arguments, server, capsys):
    command, tmp = arguments
    server.as_text = True
    assert main(command) == 2 and "came as text" in capsys.readouterr().err
    server.as_text, server.usage = False, False
    assert main(command) == 2 and "without its token counts" in capsys.readouterr().err
    server.usage = True
    assert main([*command[:-4], "--model", "other"]) == 2 and "serves ['scripted']" in capsys.readouterr().err
    assert main([*command, "--set", "context_length=20000"]) == 2 and "max_model_len" in capsys.readouterr().err
    for key, value in (("tool_parser", "other"), ("context_length", 8), ("max_num_seqs", 1), ("unheard_of", 1)):
        (tmp / "bad.yaml").write_text(yaml.safe_dump(MANIFEST | {key: value}))
        assert main([*command, "--manifest", str(tmp / "bad.yaml")]) == 2 and key in capsys.readouterr().err
    for field in ("cost_limit=3.0", "grader=other", "harness=mine", "no_field=1"):
        assert main([*command, "--set", field]) == 2 and field.split("=")[0] in capsys.readouterr().err
    assert not (tmp / "run").exists()
