"""Chromium over its debugging pipe: no driver, no library. One browser serves a whole file of tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from contextlib import suppress

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars", "remote-debugging-pipe"),
)
PATIENCE = 60
# In the browser's own words for a question that a page did not live to answer.
LEFT = ("navigated or closed", "context was destroyed", "Cannot find context", "Cannot find default execution context")


class LeftError(AssertionError):
    """The page was left while it was asked; the next one can be asked."""


class Browser:
    """A headless browser with one page."""

    def __init__(self, profile):
        ours, theirs = os.pipe(), os.pipe()

        def connect():
            # The browser reads commands from its file 3 and writes answers to its file 4.
            for source, target in ((os.dup(ours[0]), 3), (os.dup(theirs[1]), 4)):
                os.dup2(source, target)

        command = [CHROMIUM, *(f"--{flag}" for flag in FLAGS), f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        # Raised out of the way first, so that 3 and 4 can be taken.
        self._process = subprocess.Popen(command, preexec_fn=connect, close_fds=False, **quiet)  # noqa: PLW1509
        os.close(ours[0])
        os.close(theirs[1])
        self._send, self._receive = os.fdopen(ours[1], "wb", 0), os.fdopen(theirs[0], "rb", 0)
        self._number, self._rest, self._session = 0, b"", None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """One command, and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    left = any(words in answer["error"]["message"] for words in LEFT)
                    raise (LeftError if left else AssertionError)(answer)
                return answer["result"]
            self.events.append(answer)

    def _next(self):
        while b"\0" not in self._rest:
            data = self._receive.read(1 << 16)
            assert data, "the browser has gone"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def open(self, address):
        """Load a page; its own faults and what it asks of the network are in `events`."""
        self.events.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def look(self, expression):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression):
        """Wait for something to be so, on this page or on the one that a link leads to."""
        end = time.monotonic() + PATIENCE
        while True:
            with suppress(LeftError):
                if self.look(expression):
                    return
            assert time.monotonic() < end, expression
            time.sleep(0.02)

    def at(self, selector):
        """The middle of an element, scrolled into view."""
        box = self.look(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return {"x": box[0], "y": box[1]}

    def move(self, selector):
        """Point at an element."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self.at(selector))

    def click(self, selector):
        """A real press of the button."""
        place = self.at(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def key(self, name):
        """A key of the keyboard."""
        for kind in ("keyDown", "keyUp"):
            text = {"Enter": "\r", "Space": " "}.get(name)
            more = {"text": text} if text and kind == "keyDown" else {}
            code = {"Enter": 13, "Tab": 9}.get(name, 0)
            self.call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, **more)

    def close(self):
        """End the browser."""
        self._send.close()
        self._process.kill()
        self._process.wait()
        self._receive.close()
