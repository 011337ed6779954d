"""A headless Chromium, driven through chromedriver by plain HTTP (the W3C WebDriver protocol)."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def find_programs() -> tuple[str, str] | str:
    """Paths of the browser and its driver, or the reason why there is none."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if browser is None:
        return "no chromium and no chromium-browser on the path; `make chromium` installs it"
    if driver is None:
        return "no chromedriver on the path (Debian: chromium-driver)"
    return browser, driver


class Browser:
    """One browser session; use it as a context manager."""

    def __init__(self, browser: str, driver: str, profile: Path, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        self._session = ""
        try:
            self._wait_until_ready()
            options = {
                "binary": browser,
                "args": [*ARGUMENTS, f"--user-data-dir={profile}", "--window-size=1280,900"],
            }
            wanted = {
                "alwaysMatch": {
                    "browserName": "chrome",
                    "goog:chromeOptions": options,
                    "goog:loggingPrefs": {"browser": "ALL"},
                }
            }
            self._session = self._call("POST", "/session", {"capabilities": wanted})["sessionId"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and its driver."""
        try:
            if self._session:
                self._call("DELETE", f"/session/{self._session}")
        except (OSError, ValueError):
            pass
        finally:
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=10)

    def open(self, path: Path) -> None:
        """Load a local page and wait until it is complete."""
        self.visit(path.resolve().as_uri())

    def visit(self, url: str) -> None:
        """Load the page of an address and wait until it is complete."""
        self._command("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """The value that JavaScript returns."""
        return self._command("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def find(self, selector: str) -> str:
        """An element by CSS selector; fails when there is none."""
        found: str = self._command("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        return found

    def click(self, element: str) -> None:
        """Click as a mouse would, after scrolling there."""
        self._command("POST", f"/element/{element}/click", {})

    def press(self, element: str, keys: str) -> None:
        """Focus an element and type."""
        self._command("POST", f"/element/{element}/value", {"text": keys})

    def press_key(self, key: str) -> None:
        """Press and release a key wherever the focus is; `key` as JavaScript names it: Tab, Enter."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        same: dict[str, object] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.devtools("Input.dispatchKeyEvent", type="keyDown", text=text, **same)
        self.devtools("Input.dispatchKeyEvent", type="keyUp", **same)

    def console(self) -> list[dict[str, Any]]:
        """Messages of the console since the last call."""
        messages: list[dict[str, Any]] = self._command("POST", "/se/log", {"type": "browser"})
        return messages

    def devtools(self, command: str, **parameters: object) -> Any:
        """A command of the Chrome DevTools protocol."""
        return self._command("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _command(self, method: str, path: str, body: object) -> Any:
        return self._call(method, f"/session/{self._session}{path}", body)

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + self._timeout_s
        while True:
            try:
                if self._call("GET", "/status")["ready"]:
                    return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise
            time.sleep(0.05)

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({})
        )  # no proxy stands between us and localhost
        try:
            with opener.open(request, timeout=self._timeout_s) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode(errors='replace')[:2000]}") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
