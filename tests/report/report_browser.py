"""A headless Chromium, driven over the pipe of its DevTools protocol: no package is needed for that."""

import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PROBLEMS = ("error", "warning", "assert")


def find() -> str | None:
    """The path of a browser, if this machine has one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One browser with one page. ``problems`` collects what its console shows and everything it fails to load;
    ``requests`` the addresses it asked for."""

    def __init__(self, path: str):
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory()
        self._number, self._buffer = 0, b""
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{to_browser} 4>&{from_browser}',
                "bash",
                path,
                "--headless=new",
                "--remote-debugging-pipe",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                f"--user-data-dir={self._profile.name}",
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, *, wait: float = 60.0, **parameters) -> dict:
        """The result of a command; RuntimeError when the browser refuses it or is silent for ``wait`` seconds."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda message: message.get("id") == self._number, wait)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, page: pathlib.Path) -> float:
        """Loads a file and returns the seconds until it has been drawn once."""
        start = time.monotonic()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self._until(lambda message: message.get("method") == "Page.loadEventFired", 60.0)
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - start

    def evaluate(self, code: str):
        """The value of a JavaScript expression on the page."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", code))
        return found["result"].get("value")

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Sets the size of the window and the theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def _until(self, wanted, wait: float) -> dict:
        """Reads messages until the wanted one, and keeps what the console says."""
        end = time.monotonic() + wait
        while True:
            while b"\0" not in self._buffer:
                if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                    raise RuntimeError(f"the browser was silent for {wait:.0f} s")
                data = os.read(self._in, 1 << 20)
                if not data:
                    raise RuntimeError(f"the browser ended with code {self._process.wait()}")
                self._buffer += data
            text, self._buffer = self._buffer.split(b"\0", 1)
            message = json.loads(text)
            self._note(message.get("method"), message.get("params", {}))
            if wanted(message):
                return message

    def _note(self, method: str | None, what: dict) -> None:
        if method == "Runtime.exceptionThrown":
            details = what["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and what["type"] in PROBLEMS:
            self.problems.append(" ".join(str(part.get("value")) for part in what["args"]))
        elif method == "Log.entryAdded" and what["entry"]["level"] in PROBLEMS:
            self.problems.append(what["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])
        elif method == "Network.loadingFailed" and not what.get("canceled"):
            self.problems.append(what["errorText"])
