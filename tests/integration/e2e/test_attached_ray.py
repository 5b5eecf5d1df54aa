"""A run that joins a Ray cluster which is there already: it ends as any other, and the cluster goes on without a trace of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[3]
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
#: Asks a cluster, from a process of its own: its free resources equal all of them, and no actor is alive.
LOOK = """
import json, sys, time, ray
from ray._private.state import actors
ray.init(address=sys.argv[1], log_to_driver=False)
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    alive = [a["ActorClassName"] for a in actors().values() if a["State"] != "DEAD"]
    whole = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
    free = {k: ray.available_resources().get(k, 0) for k in whole}
    if not alive and free == whole:
        break
    time.sleep(1)
print("LOOK" + json.dumps({"alive": alive, "free": free, "whole": whole, "groups": len([
    g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"])}))
"""


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    folder = Path("/tmp", f"opsd-test-ray-{os.getpid()}")  # short: Ray's sockets have long names
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}", "--num-cpus=32"]
    command += ["--num-gpus=1", "--include-dashboard=false", f"--temp-dir={folder}", "--object-store-memory=500000000"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPSD_")} | TOKEN
    log = tmp_path_factory.mktemp("cluster") / "ray.log"
    with log.open("w") as out:
        head = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    deadline = time.monotonic() + 120
    while "Ray runtime started" not in log.read_text():
        assert head.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)
    yield f"{ray.util.get_node_ip_address()}:{port}"
    assert head.poll() is None, log.read_text()
    head.terminate()
    head.wait(60)
    subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.mark.slow
def test_a_run_joins_a_cluster_and_leaves_it_as_it_was(cluster: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "+recipe=opd", "scale=local", "+ray=attached"]
    command += [
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "opsd.contract.step_limit=2",
        "opsd.contract.max_tokens=32",
    ]
    command += ["opsd.tasks.max_train=2", "opsd.tasks.max_eval=1", f"hydra.run.dir={tmp_path / 'run'}"]
    env = os.environ | TOKEN | {"RAY_ADDRESS": cluster}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert (tmp_path / "run" / "report.json").is_file()
    look = subprocess.run(
        [sys.executable, "-c", LOOK, cluster],
        env=os.environ | TOKEN | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    (line,) = [x for x in look.stdout.splitlines() if x.startswith("LOOK")]
    found = json.loads(line.removeprefix("LOOK"))
    assert found["alive"] == [] and found["groups"] == 0 and found["free"] == found["whole"] == {"CPU": 32.0, "GPU": 1.0}, found
