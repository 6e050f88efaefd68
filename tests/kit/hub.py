"""A stand-in of the Hugging Face hub's HTTP interface, as far as uploads need it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import huggingface_hub.constants
import pytest

TOKEN = "hf_standin"


class Hub(ThreadingHTTPServer):
    """Repositories by name, each with its files; one user may write."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.repositories: dict[str, dict[str, bytes]] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Requests(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid username or password."})
        parts = self.path.strip("/").split("/")
        if self.path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization', 'me')}/{wanted['name']}"
            there = name in self.server.repositories
            self.server.repositories.setdefault(name, {})
            return self._answer(409 if there else 200, {"url": f"{self.server.address}/{name}"})
        name, action = "/".join(parts[2:4]), parts[4]
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.repositories[name][line["value"]["path"]] = content
        commit = {"commitUrl": f"{self.server.address}/{name}/commit/1", "commitOid": "1"}
        return self._answer(200, commit)

    def _answer(self, status: int, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def hub(*, token: str = TOKEN) -> Iterator[Hub]:
    """Run a hub, and let the client find it and its token."""
    with Hub() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)  # of HF_ENDPOINT
        patch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # it keeps a log open
        patch.setenv("HF_TOKEN", token)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            huggingface_hub.close_session()
