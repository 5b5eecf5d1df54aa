"""A ``docker`` made of namespaces, for hosts without a daemon: what the Docker adapter calls, and no more. Needs root.

A container is a process, mount, network, IPC and UTS namespace with `sleep` as its first process and a root directory of bind
mounts; `exec` enters it. So processes of a command outlive it, as in Docker. State lies in $NAMESPACE_DOCKER.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["NAMESPACE_DOCKER"])
CHROOT = shutil.which("chroot", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "chroot"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
VALUED = {"--name", "--label", "--hostname", "--network", "--security-opt", "--cap-drop", "--memory", "--memory-swap"}
VALUED |= {"--pids-limit", "--ulimit", "--workdir", "--volume", "--entrypoint"}


def fail(text: str, code: int = 1) -> int:
    print(text, file=sys.stderr)
    return code


def alive(state: dict) -> bool:
    return Path(f"/proc/{state['init']}").exists()


def load(name: str) -> dict | None:
    path = STATE / name / "state.json"
    return json.loads(path.read_text()) if path.exists() else None


def run(argv: list[str]) -> int:
    options, volumes = {}, []
    while argv[0].startswith("-"):
        option = argv.pop(0)
        if option in VALUED:
            value = argv.pop(0)
            options[option] = value
            if option == "--volume":
                volumes.append(value)
    if argv != ["python:3.11", "infinity"]:
        return fail(f"no such image: {argv}", 125)
    root = STATE / options["--name"] / "root"
    script = ["set -e", "mount --make-rprivate /", f"mount -t tmpfs none {root}"]
    for path in SYSTEM:
        if os.path.islink(path):
            script.append(f"ln -s {os.readlink(path)} {root}{path}")
        elif os.path.isdir(path):
            script.append(f"mkdir -p {root}{path}; mount --bind {path} {root}{path}; mount -o remount,ro,bind {root}{path}")
    script.append(f"mount -t tmpfs none {root}/usr/local/bin; ln -s {sys.executable} {root}/usr/local/bin/python3")
    script.append(f"mkdir -p {root}/proc {root}/dev {root}/tmp {root}/run {root}/root; mount -t proc proc {root}/proc")
    script.append(f"mount --rbind /dev {root}/dev; chmod 1777 {root}/tmp")
    for source, inside, mode in sorted((v.rsplit(":", 2) for v in volumes), key=lambda v: v[1].split("/")):
        make = f"[ -e {root}{inside} ] || {'mkdir -p' if os.path.isdir(source) else 'touch'} {root}{inside}"
        script.append(f"{make}; mount --bind {source} {root}{inside}")
        if mode == "ro":
            script.append(f"mount -o remount,ro,bind {root}{inside}")
    script.append(f"touch {root}/run/ready; exec {CHROOT} {root} sleep infinity")
    root.mkdir(parents=True)
    outer = subprocess.Popen(
        ["unshare", "-pmuin", "--fork", "--kill-child", "bash", "-c", "\n".join(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(STATE / options["--name"] / "log").open("w"),
        start_new_session=True,
    )
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    for _ in range(1000):
        time.sleep(0.01)
        if outer.poll() is not None:
            return fail((STATE / options["--name"] / "log").read_text(), 125)
        found = children.read_text().split()
        if found and Path(f"/proc/{found[0]}/root{root}/run/ready").exists():
            break
        if found and Path(f"/proc/{found[0]}/comm").read_text() == "sleep\n":
            break
    state = {"init": int(found[0]), "outer": outer.pid, "label": options["--label"].partition("=")[2], "root": str(root)}
    (STATE / options["--name"] / "state.json").write_text(json.dumps(state))
    print(options["--name"])
    return 0


def execute(argv: list[str]) -> int:
    stdin = argv[0] == "--interactive"
    name, *command = argv[1:] if stdin else argv
    state = load(name)
    if state is None or not alive(state):
        return fail(f"Error response from daemon: No such container: {name}")
    if not stdin:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGXFSZ, signal.SIGPIPE):  # which Python ignores, and its children would
        signal.signal(number, signal.SIG_DFL)
    enter = ["nsenter", "-t", str(state["init"]), "-p", "-m", "-u", "-i", "-n", CHROOT, state["root"]]
    os.execvp("nsenter", [*enter, *command])


def remove(name: str) -> int:
    state = load(name)
    if state is None:
        return fail(f"Error response from daemon: No such container: {name}")
    for pid in (state["init"], state["outer"]):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    while alive(state):
        time.sleep(0.01)
    shutil.rmtree(STATE / name)
    return 0


def listed(argv: list[str]) -> int:
    wanted = argv[argv.index("--filter") + 1]
    form = argv[argv.index("--format") + 1]
    for path in sorted(STATE.iterdir()):
        state = load(path.name)
        if state is None or (wanted.startswith("name=") and wanted != f"name=^{path.name}$"):
            continue
        print(path.name, state["label"] if "Label" in form else "")
    return 0


def main(argv: list[str]) -> int:
    verb, *rest = argv
    if verb == "version":
        return 0
    if verb == "run":
        return run([a for a in rest if a != "--detach"])
    if verb == "exec":
        return execute(rest)
    if verb == "rm":
        return remove(rest[-1])
    if verb == "ps":
        return listed(rest)
    assert verb == "inspect", argv
    state = load(rest[-1])
    if state is None:
        return fail(f"Error: No such object: {rest[-1]}")
    print("true" if alive(state) else "false")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
