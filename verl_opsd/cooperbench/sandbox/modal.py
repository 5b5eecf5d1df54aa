"""Modal sandboxes: containers in Modal's cloud. Unverified: see docs/sandbox.md.

Nothing of this host is mounted there. The workspace and the read-only binds are sent at the start, and the workspace comes back when
the sandbox is closed. Two sandboxes share no directory, so a writable bind (the pair's git remote) is refused.
"""

from __future__ import annotations

import io
import math
import os
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_opsd.cooperbench.sandbox import layout
from verl_opsd.cooperbench.sandbox.base import SandboxSpec
from verl_opsd.cooperbench.sandbox.container import Call, ContainerSandbox
from verl_opsd.cooperbench.sandbox.docker import IMAGE
from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.trees import remove_tree

APP = "verl-opsd-sandboxes"
#: A sandbox of Modal's ends by itself after this many seconds, also when nobody closes it.
LIFETIME_S = 4 * 3600
CPUS = 2.0
END_WAIT_S = 30.0
_EXTRACT = 'mkdir -p "$1" && tar -x -f - -C "$1"'
_PACK = 'tar -c -f - -C "$1" .'


class ModalSandbox(ContainerSandbox):
    """A sandbox without network in Modal's cloud.

    The memory limit is Modal's, for the container as a whole; the process limit can't be set there and is not.

    Raises:
        OpsdError: no token, a writable bind, or wrong paths.
        InfraFault: ``sandbox_unreachable``: Modal does not answer, or the image can't be built.
    """

    def __init__(self, spec: SandboxSpec, *, image: str = IMAGE):
        import modal

        if reason := missing():
            raise OpsdError(f"sandbox {spec.name}: {reason}", "this backend runs in Modal's cloud", "modal token new")
        layout.check_binds(spec)
        if spec.rw_binds:
            raise OpsdError(
                f"sandbox {spec.name}: writable binds {[inside for _, inside in spec.rw_binds]}",
                "Modal's sandboxes share no directory with this host or with one another",
                "use bubblewrap or docker for pairs, which share a git remote",
            )
        self.spec, self._closed, self._modal = spec, False, modal
        self._sandbox: Any = None
        try:
            self._app = modal.App.lookup(APP, create_if_missing=True)
            self._sandbox = modal.Sandbox.create(
                "sleep",
                "infinity",
                app=self._app,
                image=modal.Image.from_registry(image).entrypoint([]),
                timeout=LIFETIME_S,
                cpu=CPUS,
                memory=(spec.limits.memory_bytes >> 20, spec.limits.memory_bytes >> 20),
                block_network=True,
                tags={"opsd": "sandbox"},
            )
            for source, inside in ((spec.workspace, layout.WORKSPACE), *spec.ro_binds):
                self._send(source, inside)
        except modal.exception.Error as error:
            self._remove()
            raise self._fault("sandbox_unreachable", f"{type(error).__name__}: {error}") from error
        super().__init__(spec)

    def _send(self, source: Path, inside: str) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(source, arcname="." if source.is_dir() else Path(inside).name)
        where = inside if source.is_dir() else str(Path(inside).parent)
        code, output = self._sh(_EXTRACT, where, stdin=packed.getvalue())
        if code:
            raise self._fault("sandbox_unreachable", f"{source} could not be sent to {inside}: {output[-300:]!r}")

    def _start(self, argv: Sequence[bytes], stdin: bytes | None, output_bytes: int) -> Call:
        try:
            return _ModalCall(self._sandbox, self._modal.exception.Error, argv, stdin, output_bytes)
        except self._modal.exception.Error as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _alive(self) -> bool:
        try:
            return self._sandbox.poll() is None
        except self._modal.exception.NotFoundError:
            return False
        except self._modal.exception.Error as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Brings the workspace back, ends the sandbox, and shows by listing that it is gone. Idempotent.

        Raises:
            InfraFault: ``workspace_lost``, its files did not come back; ``cleanup``.
        """
        lost = ""
        if not self._closed and self._sandbox is not None:
            try:
                code, packed = self._sh(_PACK, layout.WORKSPACE)
                lost = "" if code == 0 else f"tar gave {code}"
                if not lost:
                    _replace(self.spec.workspace, packed)
            except OSError as error:
                lost = str(error)
        super().close()
        if lost:
            raise InfraFault(
                "workspace_lost",
                f"sandbox {self.spec.name}: its files could not be brought back: {lost}",
                "the workspace comes back when a sandbox is closed",
                "run the pair again",
            )

    def _remove(self) -> None:
        if self._sandbox is None:
            return
        self._sandbox.terminate(wait=True)
        deadline = time.monotonic() + END_WAIT_S
        while any(s.object_id == self._sandbox.object_id for s in self._listed()):
            if time.monotonic() > deadline:
                raise InfraFault(
                    "cleanup",
                    f"Modal still lists sandbox {self._sandbox.object_id} {END_WAIT_S:g} s after it was terminated",
                    "a closed sandbox is no longer listed",
                    f"modal container stop {self._sandbox.object_id}",
                )
            time.sleep(1.0)

    def _listed(self) -> Iterator[Any]:
        yield from self._modal.Sandbox.list(app_id=self._app.app_id)


class _ModalCall(Call):
    """One program; its output is read by a thread, as Modal's streams can't be waited for with a limit."""

    def __init__(self, sandbox: Any, error: type[Exception], argv: Sequence[bytes], stdin: bytes | None, output_bytes: int):
        self._error, self._limit = error, output_bytes
        self._process = sandbox.exec(*(os.fsdecode(part) for part in argv), text=False, timeout=math.ceil(LIFETIME_S))
        if stdin is not None:
            self._process.stdin.write(stdin)
        self._process.stdin.write_eof()
        self._process.stdin.drain()
        self._kept, self._cut, self._failure = bytearray(), False, False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            for part in self._process.stdout:
                room = self._limit - len(self._kept)
                self._cut = self._cut or len(part) > room
                self._kept += part[:room]
            self._process.wait()
        except self._error:
            self._failure = True  # the missing exit code tells

    def wait(self, timeout_s: float) -> bool:
        self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def finish(self) -> int | None:
        self._reader.join(END_WAIT_S)
        if self._failure or self._reader.is_alive():
            return None
        return self._process.returncode

    def output(self) -> tuple[bytes, bool]:
        return bytes(self._kept), self._cut


def _replace(workspace: Path, packed: bytes) -> None:
    """Puts what a sandbox sent in a workspace's place. Agents wrote it: nothing lands outside, whatever its names and links say."""
    for path in workspace.iterdir():
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink()
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(workspace, filter="tar")


def missing() -> str:
    """Why no sandbox can be made from this host, or ''."""
    import modal.config

    return "" if modal.config.config.get("token_id") else "no Modal token (MODAL_TOKEN_ID, or ~/.modal.toml)"
