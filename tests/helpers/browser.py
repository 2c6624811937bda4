"""A real browser, driven by the DevTools protocol over a pipe, and the npm packages that tests of pages need.

Nothing is installed here: tests that need a browser, node or a package are skipped if it is missing. npm packages are
looked for in $HGRN_VISION_NODE_MODULES, in node_modules of the checkout, and among npm's global ones.
"""

import base64
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--remote-debugging-pipe",
]
# no host but this machine can be found
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
# the browser reads from its descriptor 3 and writes to 4
START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 600  # seconds; the machine may be busy
READY = "document.body.dataset.ready !== undefined"  # whether the page can take an image


def find_chromium():
    """The browser's program, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


@functools.cache
def node_package(name):
    """The folder of an npm package, or None."""
    places = [os.environ.get("HGRN_VISION_NODE_MODULES"), ROOT / "node_modules"]
    if shutil.which("npm"):
        done = subprocess.run(["npm", "root", "--global"], capture_output=True, text=True)
        places.append(done.stdout.strip() or None)
    found = (Path(place) / name for place in places if place)
    return next((folder for folder in found if (folder / "package.json").is_file()), None)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serve(folder):
    """The address of a folder, as a static host would serve it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


class Browser:
    """One browser with one page; `requests` are the addresses that it and its workers asked for, `pickers` counts the
    file pickers that the page opened and nobody saw."""

    def __init__(self, profile):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [sys.executable, "-c", START, str(to_browser), str(from_browser), find_chromium(), *FLAGS, NO_NETWORK]
        command.append(f"--user-data-dir={profile}")
        self.process = subprocess.Popen(
            command, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._count = b"", 0
        self.requests, self.errors, self.answers, self.pickers = [], [], {}, 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")
        self.send("Page.setInterceptFileChooserDialog", enabled=True)

    def _watch(self, session):
        """Listen to the requests and errors of a page or worker, and to the workers that it starts."""
        options = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True}
        # sent without waiting for an answer: this happens while the answer to another call is awaited
        self._post("Target.setAutoAttach", session, **options)
        self._post("Network.enable", session)
        self._post("Runtime.enable", session)
        self._post("Runtime.runIfWaitingForDebugger", session)

    def _post(self, method, session=None, **parameters):
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._count

    def _receive(self):
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("the browser ended")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def _handle(self, event):
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(parameters["exceptionDetails"])
            case "Page.fileChooserOpened":
                self.pickers += 1
            case "Target.attachedToTarget":
                self._watch(parameters["sessionId"])
            case "Fetch.requestPaused":
                self._answer(parameters)

    def _answer(self, paused):
        """Answer a request in place of a host that tests cannot reach."""
        body = self.answers.get(paused["request"]["url"])
        if body is None:
            self._post("Fetch.failRequest", self.session, requestId=paused["requestId"], errorReason="NameNotResolved")
            return
        headers = [{"name": "Access-Control-Allow-Origin", "value": "*"}]
        body = base64.b64encode(body).decode()
        options = {"requestId": paused["requestId"], "responseCode": 200, "responseHeaders": headers, "body": body}
        self._post("Fetch.fulfillRequest", self.session, **options)

    def call(self, method, session=None, **parameters):
        """The result of a protocol command; events that arrive in the meantime are handled."""
        number = self._post(method, session, **parameters)
        while True:
            message = self._receive()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._handle(message)

    def send(self, method, **parameters):
        """A command for the page."""
        return self.call(method, self.session, **parameters)

    def intercept(self, pattern, answers):
        """Answer requests whose address has the pattern from `answers`, by address."""
        self.answers = answers
        self.send("Fetch.enable", patterns=[{"urlPattern": pattern}])

    def open(self, address):
        """Load a page, as if for the first time."""
        self.send("Network.setCacheDisabled", cacheDisabled=True)
        self.requests.clear()
        self.errors.clear()
        self.send("Page.navigate", url=address)

    def run(self, expression):
        """The value of a JavaScript expression in the page, waited for if it is a promise."""
        result = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description"))
        return result["result"].get("value")

    def wait(self, condition):
        """Wait until a JavaScript expression is true; its value."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            # while a page is being replaced there is none to ask
            with contextlib.suppress(RuntimeError):
                value = self.run(condition)
                if value:
                    return value
            if self.process.poll() is not None:
                raise RuntimeError("the browser ended")
            time.sleep(0.05)
        raise TimeoutError(f"{condition} did not become true; the page says: {self.run('document.body.innerText')}")

    def drop(self, *paths, at=(200, 300)):
        """Drop files onto the page."""
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.send("Input.dispatchDragEvent", type=kind, x=at[0], y=at[1], data=data)

    def choose(self, selector, path):
        """Give a file to a file input."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def press(self, key, code):
        """Press a key: its name and its number."""
        text = {"text": {"Enter": "\r", " ": " "}[key]} if key in ("Enter", " ") else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def resize(self, width, height, dark=False):
        """Set the size of the window, and whether the system is dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if width < 600 else 1}
        self.send("Emulation.setDeviceMetricsOverride", **metrics, mobile=width < 600)
        self.send("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path):
        """The whole page as a PNG file."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self):
        """End the browser."""
        with contextlib.suppress(RuntimeError, OSError):
            self.call("Browser.close")
        os.close(self._write)
        os.close(self._read)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def ready_page(browser, site):
    """The page of a served site, ready for an image; it must have contacted only its own host, and raised no error."""
    with serve(site) as address:
        browser.resize(1200, 900)
        browser.open(address)
        browser.wait(READY)
        yield browser
        assert any(request.endswith("model.onnx") for request in browser.requests)
        allowed = (address, f"blob:{address}", "data:")
        assert [request for request in browser.requests if not request.startswith(allowed)] == []
        assert browser.errors == []
