"""A headless Chromium, driven by its DevTools protocol over a pipe: no package is needed for it."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60.0


def find_browser() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with a single tab, which is offline and collects errors and requests."""

    def __init__(self, folder: Path) -> None:
        program = find_browser()
        assert program is not None
        read_end, self.to = os.pipe()
        self.back, write_end = os.pipe()
        options = [
            "--headless",
            "--no-sandbox",  # it is refused to root, who runs tests in containers
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ]
        # The browser reads from descriptor 3 and writes to 4.
        script = f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}'
        with (folder / "browser.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", script, program, *options],
                pass_fds=(read_end, write_end),
                stdout=log,
                stderr=log,
            )
        os.close(read_end)
        os.close(write_end)
        os.set_blocking(self.back, False)
        self.buffer = b""
        self.number = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.downloads: dict[str, str] = {}
        self.tab = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.tab = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Network.setCacheDisabled", cacheDisabled=True)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.back)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.tab and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.tab
        os.write(self.to, json.dumps(message).encode() + b"\0")
        wanted = self.number
        until = time.monotonic() + SECONDS
        while True:
            found = self._message(until)
            if found.get("id") == wanted:
                assert "error" not in found, (method, found["error"])
                result: dict[str, Any] = found["result"]
                return result
            self._note(found)

    def wait_for(self, method: str) -> None:
        """Read until this event comes."""
        until = time.monotonic() + SECONDS
        while (found := self._message(until)).get("method") != method:
            self._note(found)

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            assert time.monotonic() < until, "the browser does not answer"
            try:
                part = os.read(self.back, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
                continue
            assert part, "the browser has ended"
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog: {params['message']}")
            self.call("Page.handleJavaScriptDialog", accept=True)
        elif method == "Network.requestWillBeSent":
            self.requests.append(str(params["request"]["url"]))

    def open(self, path: Path, width: int = 1440, dark: bool = False) -> float:
        """Open a file and return the seconds until it was loaded."""
        self.errors, self.requests = [], []
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        started = time.monotonic()
        self.call("Page.navigate", url=path.absolute().as_uri())
        self.wait_for("Page.loadEventFired")
        return time.monotonic() - started

    def resize(self, width: int, height: int = 900) -> None:
        """Make the window so wide; below 600 pixels it is a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Write a PNG of the page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def allow_downloads(self, folder: Path) -> None:
        """Let downloads go into a folder."""
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
