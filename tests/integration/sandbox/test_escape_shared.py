"""Attempts over what sandboxes share: the repository, what runs beside, what comes after, links that the host might follow."""

from __future__ import annotations

import subprocess
import threading
import time

import pytest
from shells import bash, python

from verl_opsd.cooperbench.sandbox.host import processes_of

HOOKS = ("pre-receive", "update", "post-receive", "post-update", "reference-transaction", "pre-push", "post-checkout")


@pytest.mark.parametrize("protected", [True, False])
def test_a_hook_in_the_shared_repository_does_not_run(make, tmp_path, protected):
    shared = tmp_path / "git"
    shared.mkdir()
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", shared / "repo.git"], check=True)
    (shared / "repo.git" / "hooks").mkdir(exist_ok=True)
    binds = tuple((shared / "repo.git" / part, f"/git/repo.git/{part}") for part in ("hooks", "config")) if protected else ()
    first, second = (make(rw_binds=((shared, "/git"),), ro_binds=binds) for _ in range(2))
    plant = "; ".join(f"printf '#!/bin/sh\\ntouch /git/ran\\n' > hooks/{hook}; chmod +x hooks/{hook}" for hook in HOOKS)
    if protected:
        plant += "; mkdir evil; printf '#!/bin/sh\\ntouch /git/ran\\n' > evil/update; chmod +x evil/update"
        plant += "; git config core.hooksPath /git/repo.git/evil; git config core.fsmonitor 'touch /git/ran'"
    bash(first, plant, cwd="/git/repo.git")
    planted = [hook for hook in HOOKS if (shared / "repo.git" / "hooks" / hook).exists()]
    assert planted == ([] if protected else list(HOOKS))
    push = "git init -q . && git -c user.name=a -c user.email=b commit -q --allow-empty -m m"
    push += " && git push -q /git/repo.git HEAD:main"
    result = bash(second, f"{push} && git ls-remote /git/repo.git main")
    assert result.returncode == 0 and "refs/heads/main" in result.text, result.text
    second.close()
    assert not (shared / "ran").exists()


def test_the_shared_repository_leads_nowhere_else(make, secret):
    """Links of one agent in place of the repository's own files: neither the other nor the host follows them out."""
    shared = secret.parent / "git" / "r.git"
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", "--shared=group", shared], check=True)
    (shared / "hooks").mkdir(exist_ok=True)
    binds, fixed = ((shared, "/git/r.git"),), tuple((shared / p, f"/git/r.git/{p}") for p in ("hooks", "config"))
    first = make(rw_binds=binds, ro_binds=fixed)
    before = secret.read_text(), secret.stat().st_mode, secret.stat().st_uid
    plant = f"echo {secret.parent} > objects/info/alternates; mv config c; mv hooks h"
    plant += "".join(f"; ln -sf {secret} {name}" for name in ("HEAD", "packed-refs", "refs/heads/evil", "description"))
    bash(first, plant, cwd="/git/r.git")
    assert (shared / "refs/heads/evil").is_symlink() and (shared / "config").is_file() and (shared / "hooks").is_dir()
    second = make(rw_binds=binds)
    text = bash(second, "cat HEAD refs/heads/evil description packed-refs; git ls-remote .", cwd="/git/r.git").text
    assert before[0] not in text and before == (secret.read_text(), secret.stat().st_mode, secret.stat().st_uid)


def test_sandboxes_that_run_at_the_same_time_do_not_meet(make):
    """Abstract sockets, SysV memory, signals and tracing between the two agents of a pair."""
    first, second = make(), make()
    wait = "import socket\ns = socket.socket(socket.AF_UNIX); s.bind('\\0meet'); s.listen(); s.settimeout(3)\n"
    wait += "try: s.accept(); print('met')\nexcept TimeoutError: print('alone')"
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(bash(first, f'ipcmk -M 4096; python3 -c "{wait}"').text))
    thread.start()
    while not (pids := processes_of(first.uid)):
        time.sleep(0.02)
    time.sleep(0.5)
    probe = "import ctypes, os, socket\nlibc = ctypes.CDLL(None)\n"
    probe += "try: socket.socket(socket.AF_UNIX).connect('\\0meet'); print('met')\nexcept OSError: print('nobody')\n"
    probe += f"print(*(libc.ptrace(16, p, 0, 0) or libc.kill(p, 9) for p in {sorted(pids)}))"
    text = python(second, probe).text + bash(second, "ipcs -m").text
    thread.join()
    assert found[0].endswith("alone\n") and "Shared memory id" in found[0]
    assert "nobody" in text and "4096" not in text and set(text.split("\n")[1].split()) == {"-1"}


def test_nothing_of_a_closed_sandbox_is_in_the_next(make):
    """What an agent leaves for whoever comes after it: start-up files, programs, the user's Python packages."""
    leave = "mkdir -p ~/.local/lib/python3.{9..14}/site-packages; for d in ~/.local/lib/*/site-packages; do"
    leave += " echo 'print(\"left\")' > $d/usercustomize.py; done; echo 'echo left' > ~/.bashrc; cp ~/.bashrc ~/.profile"
    leave += "; printf '#!/bin/sh\\necho left\\n' | tee /tmp/git > /usr/local/bin/git; chmod +x /usr/local/bin/git"
    first = make()
    bash(first, leave)
    assert "left" in bash(first, "bash -lc 'git --version'; python3 -c 1").text
    first.close()
    text = bash(make(), "bash -lc 'git --version'; python3 -c 1; ls -A ~ /tmp; env").text
    assert "git version" in text and "left" not in text


def test_links_in_a_workspace_are_not_followed_by_the_host(make, secret):
    """The next sandbox over the same workspace hands it over again: what links point to keeps its owner and mode."""
    target = secret.parents[2]
    before = [(path.stat().st_uid, path.stat().st_mode) for path in (target, secret)]
    first = make()
    shared = first.spec.workspace / "shared"
    bash(
        first,
        f"mkdir ../shared; ln -s {secret} file; ln -s {target} dir; cp -P file ../shared/f; cp -P dir ../shared/d",
    )
    assert (first.spec.workspace / "repo" / "file").is_symlink() and (shared / "d").is_symlink()
    first.close()
    make(workspace=first.spec.workspace, rw_binds=((shared, "/shared"),))
    assert [(path.stat().st_uid, path.stat().st_mode) for path in (target, secret)] == before


def test_output_handed_to_another_sandbox_holds_nobody(make, tmp_path):
    """A descriptor can be passed through a shared directory; the command that owned it still ends on time."""
    shared = tmp_path / "shared"
    shared.mkdir()
    first, second = (make(rw_binds=((shared, "/shared"),)) for _ in range(2))
    receive = "import socket, time\ns = socket.socket(socket.AF_UNIX); s.bind('/shared/s'); s.listen(); c = s.accept()[0]\n"
    receive += "fd = socket.recv_fds(c, 1, 1)[1]; c.send(b'k'); time.sleep(20)"
    send = "import socket\ns = socket.socket(socket.AF_UNIX); s.connect('/shared/s')\n"
    send += "socket.send_fds(s, [b'x'], [1]); s.recv(1)"
    thread = threading.Thread(target=python, args=(second, receive), kwargs={"timeout_s": 4})
    thread.start()
    while not (shared / "s").exists():
        time.sleep(0.02)
    time.sleep(0.1)
    started = time.monotonic()
    result = python(first, send, timeout_s=15)
    assert result.returncode == 0, result.text
    assert time.monotonic() - started < 12
    thread.join()
