"""Drives a headless Chromium over the DevTools protocol, on a pipe: no driver and no package is needed.

One program serves all tests of a worker; each has a page of its own, which shares nothing with the others.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from waiting import HANGS

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_KEYS = {
    "Enter": ("Enter", 13),
    "Escape": ("Escape", 27),
    "Tab": ("Tab", 9),
    "ArrowDown": ("ArrowDown", 40),
    "ArrowUp": ("ArrowUp", 38),
    "ArrowLeft": ("ArrowLeft", 37),
    "ArrowRight": ("ArrowRight", 39),
    "Home": ("Home", 36),
    "End": ("End", 35),
    "PageDown": ("PageDown", 34),
    "PageUp": ("PageUp", 33),
}


def find_chromium() -> str | None:
    """The program, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A browser."""

    def __init__(self) -> None:
        program = find_chromium()
        assert program is not None, f"there is none of {', '.join(NAMES)}"
        self._profile = tempfile.TemporaryDirectory(prefix="verbatim-chromium-", ignore_cleanup_errors=True)
        (from_us, self._write), (self._read, to_us) = os.pipe(), os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-extensions",
            "--mute-audio",
            f"--user-data-dir={self._profile.name}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # Chromium reads commands from descriptor 3 and answers on 4.
        shell = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", str(from_us), str(to_us), program, *flags],
            pass_fds=(from_us, to_us),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._buffer = b""
        self._next = 0
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, AssertionError, TimeoutError):
            self.command("Browser.close", seconds=5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    @contextlib.contextmanager
    def page(self, *, width: int = 1280, height: int = 800) -> Iterator[Page]:
        """A page in a window of this size in CSS pixels, as of a browser that was never used."""
        context = self.command("Target.createBrowserContext")["browserContextId"]
        target = self.command("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._pages[session] = page = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.command(f"{domain}.enable")
            page.command("Page.setLifecycleEventsEnabled", enabled=True)
            page.command("Emulation.setFocusEmulationEnabled", enabled=True)
            screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            page.command("Emulation.setDeviceMetricsOverride", **screen)
            yield page
        finally:
            del self._pages[session]
            self.command("Target.disposeBrowserContext", browserContextId=context)

    def command(self, method: str, session: str | None = None, *, seconds: float = HANGS, **params: Any) -> Any:
        """The answer to a command of the protocol.

        Raises:
            AssertionError: it was refused, or Chromium has ended.
            TimeoutError: there was none.
        """
        self._next += 1
        number = self._next
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for answer in self._messages(seconds):
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._tell(answer)
        raise TimeoutError(f"Chromium did not answer {method} within {seconds} s")

    def listen(self, until: Callable[[], object]) -> None:
        """Hear what the pages have to say until this holds."""
        if until():
            return
        for event in self._messages(HANGS):
            self._tell(event)
            if until():
                return
        raise TimeoutError(f"Chromium did not say within {HANGS} s what is waited for")

    def _tell(self, event: dict[str, Any]) -> None:
        if (page := self._pages.get(event.get("sessionId", ""))) is not None:
            page.note(event)

    def _messages(self, seconds: float) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + seconds
        while True:
            while b"\0" in self._buffer:
                message, self._buffer = self._buffer.split(b"\0", 1)
                yield json.loads(message)
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return
            data = os.read(self._read, 1 << 20)
            if not data:
                raise AssertionError("Chromium ended")
            self._buffer += data


class Page:
    """One page.

    Attributes:
        problems: What its console said as an error: exceptions, and what its security policy refused.
        requests: The address of everything that was asked for.
    """

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session
        self._loaded: set[str] = set()
        self.problems: list[str] = []
        self.requests: list[str] = []

    def command(self, method: str, **params: Any) -> Any:
        """The answer to a command for this page."""
        return self._browser.command(method, self._session, **params)

    def open(self, url: str) -> None:
        """Load a page; does not wait for its data. Another fragment of the same page loads nothing."""
        answer = self.command("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        if (loader := answer.get("loaderId")) is not None:
            self._browser.listen(lambda: loader in self._loaded)

    def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise is waited for.

        Raises:
            AssertionError: it raised.
        """
        answer = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str) -> Any:
        """The expression's value as soon as it is true.

        Raises:
            TimeoutError: it did not become true.
        """
        end = time.monotonic() + HANGS
        found = f"(value => value instanceof Node ? true : value)({script})"
        while not (value := self.evaluate(found)):
            if time.monotonic() > end:
                text = self.evaluate("document.body.innerText")[:600]
                raise TimeoutError(f"never true: {script}\nproblems: {self.problems}\nthe page says: {text}")
            time.sleep(0.01)
        return value

    def expect(self, script: str, value: Any) -> None:
        """Wait until the expression has this value: parts of a page are drawn one after the other.

        Raises:
            AssertionError: it has another one, and keeps it.
        """
        end = time.monotonic() + HANGS
        while (found := self.evaluate(script)) != value:
            assert time.monotonic() < end, f"{script} is {found!r}, expected {value!r}\nproblems: {self.problems}"
            time.sleep(0.01)

    def settle(self) -> None:
        """Wait until what the page has begun to load has failed or is there: a picture that it begins later is."""
        self.evaluate(
            "new Promise(then => { const last = new Image(); last.onload = last.onerror = () => then(0); "
            "last.src = 'data:image/png,none'; })"
        )

    def wait_for_problem(self) -> list[str]:
        """What the console says; the next tests of `problems` do not see it."""
        self._browser.listen(lambda: self.problems)
        said, self.problems = self.problems, []
        return said

    def press(self, *keys: str) -> None:
        """Press keys one after the other; a name such as `Enter`, or one character."""
        for key in keys:
            name, code = _KEYS.get(key, (key, ord(key.upper()) if len(key) == 1 else 0))
            text = key if len(key) == 1 else "\r" if key == "Enter" else ""
            common = {"key": name, "code": name, "windowsVirtualKeyCode": code}
            self.command("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
            self.command("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Put a text into the field that has the focus."""
        self.command("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        x, y = self._middle(selector)
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def prefer(self, scheme: str) -> None:
        """The system's colours: light or dark."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """What the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))

    def _middle(self, selector: str) -> tuple[float, float]:
        quoted = json.dumps(selector)
        self.evaluate(f"document.querySelector({quoted}).scrollIntoView({{block: 'nearest'}})")
        box = self.evaluate(
            f"(() => {{ const b = document.querySelector({quoted}).getClientRects()[0]; "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return box[0], box[1]

    def note(self, event: dict[str, Any]) -> None:
        """Keep what an event of the protocol says of this page."""
        params = event.get("params", {})
        match event.get("method"):
            case "Page.lifecycleEvent" if params["name"] == "load":
                self._loaded.add(params["loaderId"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if params["type"] == "error":
                self.problems.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Page.javascriptDialogOpening":
                self.problems.append(f"a dialog opened: {params['message']}")
                self.command("Page.handleJavaScriptDialog", accept=False)
