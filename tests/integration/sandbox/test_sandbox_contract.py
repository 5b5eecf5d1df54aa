"""Beside the contract suite: what the backends of this host promise on top, and what the isolated one does."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shells import bash

from verl_opsd.cooperbench.sandbox import bubblewrap, host
from verl_opsd.cooperbench.sandbox.host import STATE_ROOT, processes_of
from verl_opsd.errors import InfraFault, OpsdError


def host_processes_with(marker: str) -> list[int]:
    """Host processes whose command line holds the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def test_killed_by_a_signal_is_128_plus_its_number(sandbox):
    assert bash(sandbox, "kill -9 $$").returncode == 137
    assert bash(sandbox, "kill -TERM $$").returncode == 143


def test_default_directory_is_the_repo(sandbox):
    (sandbox.spec.workspace / "repo" / "here").write_text("x")
    assert bash(sandbox, "ls").text == "here\n"
    assert bash(sandbox, "ls", cwd="/workspace").text == "repo\n"


def test_a_wrong_command_line_is_refused(sandbox):
    with pytest.raises(OpsdError):
        sandbox.run([], timeout_s=5)
    with pytest.raises(OpsdError):
        sandbox.run(["A=1", "id"], timeout_s=5)


@pytest.mark.parametrize(("size", "truncated"), [(99_999, False), (100_000, False), (100_001, True), (50_000_000, True)])
@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
def test_output_is_cut_and_never_blocks_the_command(make, backend, size, truncated):
    sandbox = make(backend, limits={"output_bytes": 100_000})
    result = bash(sandbox, f"head -c {size} /dev/zero; touch done")
    assert len(result.output) == min(size, 100_000)
    assert (result.truncated, result.returncode) == (truncated, 0)
    assert (sandbox.spec.workspace / "repo" / "done").exists()


def test_past_its_limit_the_whole_tree_is_killed(sandbox):
    result = bash(sandbox, "echo started; sleep 4711 & sleep 4711 & (sleep 4711 | sleep 4711)", timeout_s=0.7)
    assert (result.returncode, result.timed_out, result.output) == (124, True, b"started\n")
    assert 0.7 <= result.seconds < 60
    assert host_processes_with("sleep\x004711") == []


def test_background_processes_end_with_their_command(sandbox):
    started = time.monotonic()
    result = bash(sandbox, "sleep 4712 & echo $!; disown -a")
    assert time.monotonic() - started < 60, "a background process that holds the pipe must not hold the caller"
    assert result.returncode == 0
    assert host_processes_with("sleep\x004712") == []


def test_a_home_of_any_depth_and_permissions_is_removed(sandbox):
    """Deeper than Python's recursion limit, with a directory that nobody may list."""
    made = bash(
        sandbox,
        "cd && python3 -c \"import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\" && mkdir -p shut/in && chmod 0 shut",
    )
    assert made.returncode == 0, made.text
    sandbox.close()


def test_close_is_idempotent_and_ends_running_commands(sandbox):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sandbox.run, ["sleep", "4713"], timeout_s=60)
        while not host_processes_with("sleep\x004713"):
            time.sleep(0.02)
        sandbox.close()
        with pytest.raises(InfraFault) as fault:
            future.result(timeout=10)
    assert fault.value.kind == "sandbox_died"
    assert host_processes_with("sleep\x004713") == []
    sandbox.close()
    with pytest.raises(InfraFault) as fault:
        sandbox.run(["true"], timeout_s=5)
    assert fault.value.kind == "sandbox_died"
    assert (sandbox.spec.workspace / "repo").is_dir()


# From here on: the isolated backend.


def test_files_stay_between_commands_and_processes_do_not(make):
    sandbox = make()
    bash(sandbox, "echo 1 > /tmp/a; echo 2 > ~/b; echo '#!/bin/sh\necho tool' > /usr/local/bin/tool; sleep 60 &")
    bash(sandbox, "chmod +x /usr/local/bin/tool")
    assert bash(sandbox, "cat /tmp/a ~/b; tool; ps -e | grep -c sleep").text == "1\n2\ntool\n0\n"


def test_two_sandboxes_see_nothing_of_each_other(make):
    first, second = make(), make()
    assert first.uid != second.uid
    script = "echo x > /tmp/of-first; echo x > /workspace/of-first; echo x > ~/of-first; echo x > /usr/local/bin/of-first"
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(bash, first, f"{script}; echo x > /dev/shm/of-first; sleep 1.5")
        while not (first.spec.workspace / "of-first").exists():
            time.sleep(0.01)
        seen = bash(
            second,
            "find /tmp /dev /home /workspace /usr/local -name of-first | wc -l\n"
            "ps -e -o args | grep -c 'sleep [1]'; ls /proc | grep -c '^[0-9]'",
        )
        files, sleeps, processes = map(int, seen.text.split())
        assert (files, sleeps) == (0, 0) and processes <= 6
        assert future.result().returncode == 0


def test_one_bare_repository_is_pushed_to_from_two_sandboxes_at_once(make, tmp_path):
    shared = tmp_path / "git"
    shared.mkdir()
    setup = make(rw_binds=((shared, "/git"),))
    assert bash(setup, "git init -q --bare /git/repo.git && git -C /git/repo.git symbolic-ref HEAD").text == "refs/heads/main\n"
    pair = [make(rw_binds=((shared, "/git"),)) for _ in range(2)]

    def work(index: int) -> None:
        script = f"""set -e
        git init -q . && git config user.email a@b && git config user.name agent{index}
        git remote add origin /git/repo.git
        for i in $(seq 8); do
          echo {index} $i > f$i; git add .; git commit -qm "c$i"
          git push -q -f origin HEAD:agent{index} HEAD:refs/heads/main
        done
        git tag -a -m pr pr/agent{index}; git push -q origin pr/agent{index}; git fetch -q origin"""
        result = bash(pair[index], script, timeout_s=60)
        assert result.returncode == 0 or "cannot lock ref" in result.text, result.text
        final = bash(pair[index], f"git push -q -f origin HEAD:agent{index} && git push -q -f origin pr/agent{index}; true")
        assert final.returncode == 0

    # main is forced by both, as the harness does, so only a lost race for its lock may fail a push
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    refs = bash(pair[0], "git ls-remote /git/repo.git | cut -f2 | sort").text.split()
    assert {"refs/heads/agent0", "refs/heads/agent1", "refs/heads/main"} <= set(refs)
    for reader in pair:
        log = bash(
            reader,
            "git clone -q /git/repo.git /tmp/c && cd /tmp/c && git fsck --strict && cat f1",
        )
        assert log.returncode == 0, log.text


def test_interpreter_git_and_binds_are_there(make, tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "data").write_text("bound\n")
    sandbox = make(ro_binds=((tmp_path / "tools", "/opt/deep/er/tools"),))
    result = bash(
        sandbox,
        "python3 -c 'import ssl, sqlite3, multiprocessing as m; m.Lock(); print(1)'; cat /opt/deep/er/tools/data",
    )
    assert result.text == "1\nbound\n"
    assert bash(sandbox, "echo x > /opt/deep/er/tools/new").returncode == 1
    assert not (tmp_path / "tools" / "new").exists()
    assert (
        bash(sandbox, "git config --system --get-all safe.directory; git config --system core.hooksPath").text
        == "*\n/dev/null\n"
    )


def test_a_bind_below_a_writable_bind_stays_read_only(make, tmp_path):
    (tmp_path / "git" / "hooks").mkdir(parents=True)
    binds = {"rw_binds": ((tmp_path / "git", "/git"),), "ro_binds": ((tmp_path / "git" / "hooks", "/git/hooks"),)}
    sandbox = make(**binds)
    assert (
        bash(sandbox, "touch /git/x && ! touch /git/hooks/x && ! rm -r /git/hooks && ! mv /git/hooks /git/h2").returncode == 0
    )
    assert os.listdir(tmp_path / "git" / "hooks") == []


def test_programs_of_a_host_whose_python_is_in_usr_local(make, tmp_path, monkeypatch):
    """As in Docker's python images: /usr/local/bin is covered by the sandbox's own, what was there still works."""
    tools = tmp_path / "usr-local-bin"
    tools.mkdir()
    (tools / "hosttool").write_text("#!/bin/sh\necho from host\n")
    (tools / "hosttool").chmod(0o755)
    (tools / "alias").symlink_to("hosttool")
    monkeypatch.setattr(host, "LOCAL_BIN", tools)
    sandbox = make()
    assert sandbox.run(["hosttool"], timeout_s=5).text == "from host\n"
    assert sandbox.run(["alias"], timeout_s=5).text == "from host\n"


def test_close_leaves_nothing_on_the_host(make):
    sandbox = make()
    groups, state = sandbox._cgroup.paths, STATE_ROOT / sandbox.label
    bash(sandbox, "mkdir -p /tmp/a/b ~/c; touch /tmp/a/b/x")
    assert all(path.is_dir() for path in groups) and os.path.ismount(state)
    sandbox.close()
    assert not any(path.exists() for path in groups)
    assert not state.exists()
    assert processes_of(sandbox.uid) == set()
    assert str(state) not in Path("/proc/mounts").read_text()


def test_a_dead_bwrap_is_a_fault_and_not_a_result(make):
    sandbox = make()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sandbox.run, ["sleep", "4714"], timeout_s=60)
        while not (pids := host_processes_with(f"opsd-sandbox:{sandbox.label}")) or not processes_of(sandbox.uid):
            time.sleep(0.02)
        os.kill(min(pids), 9)
        with pytest.raises(InfraFault) as fault:
            future.result(timeout=20)
    assert fault.value.kind == "sandbox_died"
    assert host_processes_with("sleep\x004714") == []
    assert sandbox.run(["true"], timeout_s=5).returncode == 0


def test_a_bind_that_vanished_is_a_fault_and_not_a_result(make, tmp_path):
    (tmp_path / "data").mkdir()
    sandbox = make(ro_binds=((tmp_path / "data", "/data"),))
    (tmp_path / "data").rmdir()
    with pytest.raises(InfraFault) as fault:
        sandbox.run(["true"], timeout_s=5)
    assert fault.value.kind == "sandbox_died"
    assert str(tmp_path / "data") in str(fault.value)


def test_memory_of_all_processes_together(make):
    sandbox = make(limits={"memory_bytes": 160 << 20})
    if sandbox.limit_source["memory"] != "cgroup":
        pytest.skip("no memory control group here: the limit is for each process")
    one = "import time; x = bytearray(100 << 20); time.sleep(2)"
    assert bash(sandbox, f"python3 -c '{one}'; echo $?").text.split()[-1] == "0"  # one alone fits
    result = bash(sandbox, f"python3 -c '{one}' & a=$!; python3 -c '{one}' & b=$!; wait $a; r=$?; wait $b; echo $r $?")
    assert (
        "137" in result.text.split()[-2:]
    )  # the other one fits, unless it asks for more before the first one's memory is back
    assert sandbox.run(["python3", "-c", "x = bytearray(400 << 20)"], timeout_s=20).returncode == 137


def test_without_cgroups_the_rlimits_hold(make, monkeypatch):
    none = bubblewrap.cgroup.CgroupHost({}, {}, {"memory": "none", "pids": "none"})
    monkeypatch.setattr(bubblewrap.cgroup, "find_cgroups", lambda: none)
    sandbox = make(limits={"memory_bytes": 200 << 20, "processes": 20})
    assert sandbox.limit_source == {"memory": "rlimit", "pids": "rlimit"}
    memory = sandbox.run(["python3", "-c", "x = bytearray(400 << 20)"], timeout_s=20)
    assert memory.returncode == 1 and "MemoryError" in memory.text
    script = "import os, time\nn = 0\ntry:\n  while n < 100:\n    if not os.fork(): time.sleep(9)\n    n += 1\n"
    script += "except OSError: pass\nprint(n)"
    forks = int(sandbox.run(["python3", "-c", script], timeout_s=20).text)
    assert 10 <= forks < 20
    sandbox.close()
    assert processes_of(sandbox.uid) == set()


def test_start_to_first_command(make):
    """150 ms on an idle machine; on a busy one as much more as the slowest plain process takes longer than its idle 2 ms."""
    make()  # the checks that are made once a process
    times, plain = [], []
    for _ in range(8):
        started = time.monotonic()
        subprocess.run(["/bin/true"])
        plain.append(time.monotonic() - started)
        started = time.monotonic()
        make().run(["true"], timeout_s=5)
        times.append(time.monotonic() - started)
    assert min(times) <= 0.15 * max(1, max(plain) / 0.002), (times, plain)


def test_user_ids_come_from_the_documented_range(make):
    sandboxes = [make() for _ in range(3)]
    uids = [int(sandbox.run(["id", "-u"], timeout_s=5).text) for sandbox in sandboxes]
    assert len(set(uids)) == 3 and all(60600 <= uid <= 61099 for uid in uids)
    assert uids == [sandbox.uid for sandbox in sandboxes]
    assert dataclasses.is_dataclass(sandboxes[0].spec)


def test_no_descriptor_leaks(make, tmp_path):
    for backend in ("bubblewrap", "process"):
        sandbox = make(backend)
        bash(sandbox, "true")
        before = set(os.listdir("/proc/self/fd"))
        for _ in range(5):
            bash(sandbox, "echo x", stdin=b"y")
            bash(sandbox, "sleep 5", timeout_s=0.05)
            sandbox.run(["echo", "x" * 200_000], timeout_s=5)
            sandbox.run(["no-such-program"], timeout_s=5)
        assert set(os.listdir("/proc/self/fd")) <= before  # what earlier tests left may be closed meanwhile


def test_a_command_gets_no_descriptor_of_the_host(make):
    result = make().run(["python3", "-c", "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"], timeout_s=9)
    assert result.text == "[0, 1, 2]\n"
