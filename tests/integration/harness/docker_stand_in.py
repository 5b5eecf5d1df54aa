"""A ``docker`` for hosts without one: `run -d`, `exec`, `stop` and `rm -f` of one image, each container a bubblewrap sandbox.

The program on PATH hands its arguments to this process, which keeps the sandboxes: an unmodified harness that calls
`docker` runs its commands in namespaces.
"""

from __future__ import annotations

import base64
import json
import shutil
import socketserver
import sys
import threading
from pathlib import Path

from verl_opsd.cooperbench.sandbox import Sandbox, SandboxSpec, make_sandbox

PROGRAM = """#!{python} -SE
import base64, json, socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect({address!r})
    with s.makefile("rw") as f:
        f.write(json.dumps(sys.argv[1:]) + "\\n")
        f.flush()
        code, output = json.loads(f.readline())
sys.stdout.buffer.write(base64.b64decode(output))
sys.exit(code)
"""


class DockerStandIn:
    """A context that answers `docker` calls of the program that it writes into ``directory/bin``.

    Args:
        base: the repository that a container finds at /workspace/repo.
    """

    def __init__(self, directory: Path, base: Path):
        self._root, self._base = directory, base
        self.containers: dict[str, Sandbox] = {}
        self.calls: list[list[str]] = []
        (directory / "bin").mkdir(parents=True)
        address = directory / "docker.sock"
        program = directory / "bin" / "docker"
        program.write_text(PROGRAM.format(python=sys.executable, address=str(address)))
        program.chmod(0o755)
        stand_in = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                code, output = stand_in.answer(json.loads(self.rfile.readline()))
                self.wfile.write((json.dumps([code, base64.b64encode(output).decode()]) + "\n").encode())

        self._server = socketserver.ThreadingUnixStreamServer(str(address), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def path(self) -> str:
        return str(self._root / "bin")

    def __enter__(self) -> DockerStandIn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for sandbox in self.containers.values():
            sandbox.close()

    def answer(self, argv: list[str]) -> tuple[int, bytes]:
        """Exit code and output of one call."""
        self.calls.append(argv)
        verb, *rest = argv
        if verb == "run":
            name = f"container{len(self.containers)}"
            workspace = self._root / name
            shutil.copytree(self._base, workspace / "repo", symlinks=True)
            self.containers[name] = make_sandbox("bubblewrap", SandboxSpec(name, workspace))
            return 0, f"{name}\n".encode()
        if verb in ("stop", "rm"):
            self.containers[rest[-1]].close()
            return 0, b""
        assert verb == "exec", argv
        cwd, env = "/", {}
        while rest[0].startswith("-"):
            option, value, *rest = rest
            if option == "-w":
                cwd = value
            else:
                assert option == "-e", argv
                key, _, env[key] = value.partition("=")
        name, *command = rest
        done = self.containers[name].run(command, timeout_s=60, cwd=cwd, env=env)
        return done.returncode, done.output
