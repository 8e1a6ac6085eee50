"""A headless Chromium, driven by the messages of its DevTools over a pipe: no driver, no port, no package."""

import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# A page on a machine whose cores are busy with other tests. Nothing waits this long unless it hangs.
PATIENCE = 1200.0


class Browser:
    """One browser and its one page. `said` holds what the page's console, scripts and requests complained of."""

    def __init__(self, profile: Path) -> None:
        reads, self._to = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in os.pipe())
        self._from, writes = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in os.pipe())
        assert CHROMIUM is not None
        options = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars"
        options += " --no-first-run --disable-background-networking --disable-component-update --remote-debugging-pipe"
        quiet = [(os.POSIX_SPAWN_OPEN, end, os.devnull, os.O_RDWR, 0) for end in (1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, reads, 3), (os.POSIX_SPAWN_DUP2, writes, 4)]
        command = [CHROMIUM, *options.split(), f"--user-data-dir={profile}", "about:blank"]
        self._pid = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=[*quiet, *pipes], setpgroup=0)
        os.close(reads)
        os.close(writes)
        self._number, self._left, self._session = 0, b"", None
        self.said: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in "Page", "Runtime", "Network", "Log":
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        number, answers = self._number, []
        self._until(lambda got: got.get("id") == number and not answers.append(got), f"an answer to {method}")
        if "error" in answers[0]:
            raise RuntimeError(f"{method}: {answers[0]['error']}")
        return answers[0]["result"]

    def open(self, address: str) -> None:
        """Returns once the page and all that it names have loaded."""
        self._loaded = False
        self.call("Page.navigate", url=address)
        if not self._loaded:
            self._until(lambda _: self._loaded, f"{address} to load")

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """The size of the window in CSS pixels, and the scheme that the reader's system prefers."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise; run as if the reader had clicked."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        found = self.call("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of the expression, once it is true."""
        end = time.monotonic() + PATIENCE
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"waited {PATIENCE:g} s for {script}"
            time.sleep(0.05)
        return value

    def close(self) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._to)
        os.close(self._from)

    def _until(self, done: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Reads messages until one will do."""
        end = time.monotonic() + PATIENCE
        while True:
            while b"\0" in self._left:
                text, _, self._left = self._left.partition(b"\0")
                message = json.loads(text)
                self._hear(message)
                if done(message):
                    return
            ready, _, _ = select.select([self._from], [], [], max(0, end - time.monotonic()))
            assert ready, f"waited {PATIENCE:g} s for {what}"
            more = os.read(self._from, 1 << 16)
            assert more, f"Chromium ended; it was asked for {what}"
            self._left += more

    def _hear(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.said.append(str(params["exceptionDetails"].get("exception", params)))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.said.append(f"{params['type']}: {[a.get('value') for a in params['args']]}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.responseReceived" if params["response"]["status"] >= 400:
                self.said.append(f"{params['response']['status']} {params['response']['url']}")
            case _:
                pass
