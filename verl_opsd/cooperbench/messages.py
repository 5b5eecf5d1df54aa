"""The embedded message store: a Redis-compatible server in this process, for the harness' own messaging connector."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import redis
from cooperbench.agents.mini_swe_agent_v2.connectors.messaging import MessagingConnector
from fakeredis import TcpFakeServer


class MessageStore:
    """One server on the loopback interface, started on first use. Sandboxes have no network and can't reach it.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: TcpFakeServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Address of the running server."""
        with self._lock:
            if self._server is None:
                self._server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
                self._server.daemon_threads = True
                self._thread = threading.Thread(target=self._serve, args=(self._server,), daemon=True, name="messages")
                self._thread.start()
            return f"redis://127.0.0.1:{self._server.server_address[1]}"

    @staticmethod
    def _serve(server: TcpFakeServer) -> None:
        server.serve_forever(poll_interval=0.2)

    def connect(self, agent_id: str, agents: Sequence[str], run_id: str) -> MessagingConnector:
        """The harness' connector of one agent; keys carry the prefix ``run:<run_id>``."""
        return MessagingConnector(agent_id=agent_id, agents=list(agents), url=f"{self.url}#run:{run_id}")

    def keys(self, run_id: str) -> list[str]:
        """Keys that a pair has in the store."""
        with redis.Redis.from_url(self.url) as client:
            return sorted(k.decode() for k in client.scan_iter(match=f"run:{run_id}:*"))

    def forget(self, run_id: str, connectors: Sequence[MessagingConnector] = ()) -> None:
        """Closes a pair's connections and removes its keys."""
        for connector in connectors:
            connector._client.close()
        with redis.Redis.from_url(self.url) as client:
            for key in client.scan_iter(match=f"run:{run_id}:*"):
                client.delete(key)

    def close(self) -> None:
        """Stops the server. Idempotent; a later use starts a fresh one."""
        with self._lock:
            if self._server is not None and self._thread is not None:
                self._server.shutdown()
                self._server.server_close()
                self._thread.join(timeout=5)
            self._server = self._thread = None


@functools.cache
def process_store() -> MessageStore:
    """The store of this process."""
    return MessageStore()
