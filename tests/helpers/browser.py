"""A headless Chromium, spoken to over a pair of pipes by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

ON_PIPES = """import os, sys
ends = [os.dup(int(each)) for each in sys.argv[1:3]]
kept = [os.dup2(end, 20 + index) for index, end in enumerate(ends)]
for index, end in enumerate(kept):
    os.dup2(end, 3 + index)
os.closerange(5, 64)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Gives a program two pipes as its descriptors 3 and 4, where the browser expects them."""


class Browser:
    """One browser with one page.

    Args:
        folder: an empty folder for its profile.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        (theirs_in, self._to), (self._from, theirs_out) = os.pipe(), os.pipe()
        words = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={folder}/profile", "--remote-debugging-pipe",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", ON_PIPES, str(theirs_in), str(theirs_out), *words],
            pass_fds=(theirs_in, theirs_out),
            env={**os.environ, "HOME": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._rest, self._session = 0, b"", ""
        self.problems: list[str] = []
        """Uncaught errors of scripts, and what the page's policy refused."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> Any:
        """Call a method of the protocol; return its result."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(answer["params"]["exceptionDetails"])[:500])
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.problems.append(answer["params"]["entry"]["text"])

    def open(self, address: str, *, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Open an address in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until an expression in the page is true."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, f"not within {seconds} s: {expression}"

    def press(self, key: str) -> None:
        """Press and release a key, such as Tab."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code="Space" if key == " " else key,
                windowsVirtualKeyCode=codes[key], text=" " if key == " " and kind != "keyUp" else "",
            )  # fmt: skip

    def screenshot(self) -> bytes:
        """Return the window as a PNG file."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser and all of its processes."""
        os.close(self._to)
        os.close(self._from)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _receive(self) -> Any:
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)
