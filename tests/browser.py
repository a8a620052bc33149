"""A page in a real headless browser, without a network: a script in the page looks at it and tells
what it has found.

The page comes from a server of this process. It counts as loaded only when the script has told, so
that a screenshot shows what the script has waited for.
"""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import subprocess
import tempfile
import threading
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import LIMIT_S

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
LEAST = 500
_HOLD = '<img src="/hold.png" style="display: none">'
_TELL = """
const tell = (found) => fetch('/found', {
  method: 'POST',
  body: JSON.stringify(found, (key, value) => (typeof value === 'bigint' ? Number(value) : value)),
});
"""


def needed() -> str:
    """The first of `PROGRAMS` that is installed; without one, the calling test is skipped."""
    for name in PROGRAMS:
        if shutil.which(name):
            return name
    pytest.skip("no browser: apt-get install chromium-headless-shell")


@dataclass
class Visit:
    """What the script told, and the paths that the page asked the server for."""

    found: Any = None
    asked: list[str] = field(default_factory=list)
    told: threading.Event = field(default_factory=threading.Event)


def visit(
    site: Path,
    script: str,
    files: dict[str, Path],
    screenshot: Path | None = None,
    fragment: str = "",
    page: str = "index.html",
    width: int = 1600,
) -> Visit:
    """Opens index.html of the folder `site`.

    script: JavaScript that calls `tell(found)`. files: more that the page may load, by their paths.
    fragment: what stands behind the address, where HOME is the server. A page narrower than a
    window can be (`LEAST`) is in a frame.
    """
    program, result = needed(), Visit()
    handler = functools.partial(_Handler, site, _TELL + script, files, result)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}"
    address = f"/{page.removesuffix('index.html')}{fragment.replace('HOME', home)}"
    if width < LEAST:
        frame = f'<iframe src="{address}" style="width: {width}px; height: 995px; border: 0">'
        handler.keywords["frame"] = f'<body style="margin: 0">{frame}</iframe>{_HOLD}</body>'
        address = "/frame"
    with tempfile.TemporaryDirectory() as folder:
        picture = screenshot or Path(folder) / "page.png"
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--window-size={width},1000",
            f"--user-data-dir={folder}/profile",
        ]
        try:
            done = subprocess.run(
                [program, *options, f"--screenshot={picture}", home + address],
                capture_output=True,
                timeout=LIMIT_S,
            )
        finally:
            result.told.set()
            server.shutdown()
    assert result.found is not None, done.stderr.decode()[-2000:]
    return result


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(
        self,
        site: Path,
        script: str,
        files: dict[str, Path],
        result: Visit,
        *args: Any,
        frame: str = "",
    ):
        self._frame = frame
        self._site, self._script, self._files, self._result = site, script, files, result
        super().__init__(*args, directory=str(site))

    def do_GET(self) -> None:
        path = urllib.parse.urlsplit(self.path).path
        self._result.asked.append(path)
        if path.endswith("/"):
            page = (self._site / path[1:] / "index.html").read_text()
            more = f'<script src="/look.js" defer></script>{_HOLD}'
            self._send(page.replace("</body>", f"{more}</body>").encode(), "text/html")
        elif path == "/frame":
            self._send(self._frame.encode(), "text/html")
        elif path == "/look.js":
            self._send(self._script.encode(), "text/javascript")
        elif path == "/hold.png":
            self._result.told.wait(LIMIT_S)
            self.send_error(404)
        elif path in self._files:
            self._send(self._files[path].read_bytes(), "application/json")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self._result.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(b"", "text/plain")
        self._result.told.set()

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        return
