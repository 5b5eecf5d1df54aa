"""A page in headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1", "--remote-debugging-port=0",
)  # fmt: skip


def chromium() -> str | None:
    """Path of the browser; None where there is none (Debian: apt-get install chromium)."""
    return shutil.which("chromium")


class Browser:
    """One tab. ``problems``: exceptions, console errors and warnings, and requests that are not of the page itself."""

    def __init__(self, socket: Any):
        self._socket, self._numbers, self._waiting = socket, itertools.count(1), {}
        self.problems: list[str] = []
        self.events: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message.get("result", {}))
            self._event(message)

    def _event(self, message: dict[str, Any]) -> None:
        method, p = message["method"], message.get("params", {})
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(p["exceptionDetails"])[:500])
        if method == "Log.entryAdded" and p["entry"]["level"] in ("error", "warning"):
            self.problems.append(p["entry"]["text"])
        if method == "Runtime.consoleAPICalled" and p["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(p["args"])[:500])
        if method == "Network.requestWillBeSent" and not p["request"]["url"].startswith(("file:", "data:")):
            self.problems.append(f"request of {p['request']['url']}")

    async def open(self, url: str) -> float:
        """Goes to a page; seconds until it and its script are done, as the page itself measured them."""
        await self.call("Page.navigate", url="about:blank")
        await self.call("Page.navigate", url=url)
        while await self.value("document.readyState") != "complete" or not await self.value("location.protocol === 'file:'"):
            time.sleep(0.02)
        return float(await self.value("performance.timing.loadEventEnd - performance.timing.navigationStart")) / 1000

    async def value(self, expression: str) -> Any:
        """Value of an expression; a promise is waited for."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def press(self, key: str, code: int, text: str = "") -> None:
        """One key."""
        for kind in ("rawKeyDown", "char", "keyUp") if text else ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    async def size(self, width: int, height: int) -> None:
        """The viewport in CSS pixels."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    async def theme(self, name: str) -> None:
        """``light`` or ``dark``."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def screenshot(self, path: Path) -> None:
        """The viewport as PNG."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"]))


@contextlib.asynccontextmanager
async def browse(folder: Path) -> AsyncIterator[Browser]:
    """A browser with an empty profile in ``folder``; ends with the block."""
    import aiohttp

    executable = chromium()
    assert executable is not None
    process = subprocess.Popen(
        [executable, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port_file = folder / "DevToolsActivePort"
        for _ in range(600):
            if port_file.is_file() and len(port_file.read_text().split()) == 2:
                break
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                address = next(t["webSocketDebuggerUrl"] for t in await answer.json() if t["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                tab = Browser(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.call(f"{domain}.enable")
                yield tab
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)
