"""A Chromium without a window, asked over a pipe by its DevTools protocol: no package of its own is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
PLAYWRIGHTS = ("chromium*/chrome-linux*/chrome", "chromium*/chrome-*linux*/*headless*shell")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1100,900"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)


def installed() -> str | None:
    """A Chromium that is on the path, or that playwright has installed; none is ever downloaded."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    return next((str(path) for pattern in PLAYWRIGHTS for path in sorted(cache.glob(pattern))), None)


class Page:
    """One page: what it asked for, and what is on it."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._left = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def open(self, file: Path) -> list[str]:
        """Open a file, and return the addresses that it asked for besides, and what it complained of."""
        self._events.clear()
        self.ask("Page.navigate", url=file.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message())
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        asked = [event["params"] for event in self._events]
        urls = [one["request"]["url"] for one in asked if "request" in one]
        said = [one["entry"]["text"] for one in asked if "entry" in one]
        return [url for url in urls if not url.startswith("data:") and url != file.as_uri()] + said

    def evaluate(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        return answer["result"].get("value")

    def screenshot(self, file: Path, box: dict[str, float] | None = None) -> None:
        """Write the page, or a part of it, as a picture."""
        clip = {} if box is None else {"clip": {**box, "scale": 1}}
        answer = self.ask("Page.captureScreenshot", captureBeyondViewport=True, **clip)
        file.write_bytes(base64.b64decode(answer["data"]))

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            if "method" in answer:
                self._events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            read = os.read(self._read, 1 << 20)
            assert read, "the browser has ended"
            self._left += read
        message, _, self._left = self._left.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told


@contextmanager
def page(browser: str, profile: Path) -> Iterator[Page]:
    """A page of a browser that is started for it, with a profile of its own."""
    to_browser, ours_to = os.pipe()
    ours_from, from_browser = os.pipe()
    # It reads from descriptor 3 and writes to 4, which a shell can arrange, if none of the two is there already.
    low, (to_browser, from_browser) = (
        (to_browser, from_browser),
        (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_browser, from_browser)),
    )
    for fd in low:
        os.close(fd)
    taken = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
    with open(profile.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", taken, "_", browser, *QUIET, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=log,
            stderr=log,
        )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(ours_from, ours_to)
    finally:
        os.close(ours_to)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        os.close(ours_from)
