"""A stand-in of the Hugging Face hub's HTTP interface, as far as this package needs it.

A repository is `owner/name`, one of its revisions `owner/name@revision`; those of data sets begin
with `datasets/`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import datasets.config
import huggingface_hub
import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _http
from transformers import dynamic_module_utils
from transformers.utils import hub as transformers_hub

TOKEN = "hf_standin"


class Hub(ThreadingHTTPServer):
    """Repositories by name, each with its files; one user may write, and read what is gated."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def _commit(key: str) -> str:
    return hashlib.sha1(key.encode()).hexdigest()


class _Requests(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        asked = re.fullmatch(
            r"(?:api/(?P<kind>models/|datasets/)(?P<api>[^/]+/[^/]+)"
            r"(?:/(?P<what>revision|tree)/(?P<at>[^/]+))?"
            r"|(?P<of>datasets/)?(?P<raw>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+))",
            path,
        )
        if asked is None:
            return self._refuse(404, "EntryNotFound")
        part = asked["kind"] or asked["of"] or ""
        name = part.replace("models/", "") + (asked["api"] or asked["raw"])
        key = self._find(name, asked["at"] or asked["rev"] or "main")
        if key is None:
            return None
        files = self.server.repositories[key]
        if asked["what"] == "tree":
            return self._answer(200, [_entry(file, held) for file, held in files.items()])
        if asked["api"] is not None:
            about: dict[str, Any] = {"id": asked["api"], "sha": _commit(key), "private": False}
            about |= {"siblings": [{"rfilename": f} for f in files], "tags": [], "downloads": 0}
            return self._answer(200, about)
        if asked["file"] not in files:
            return self._refuse(404, "EntryNotFound")
        held = files[asked["file"]]
        named = {"ETag": f'"{_commit(held.hex())}"', "X-Repo-Commit": _commit(key)}
        return self._answer(200, held, **named)

    do_HEAD = do_GET  # noqa: N815  as the server calls it

    def _find(self, name: str, revision: str) -> str | None:
        """The key of a repository's revision, or an answer that says why there is none."""
        there = [k for k in self.server.repositories if k.partition("@")[0] == name]
        found = [k for k in there if revision in (k.partition("@")[2] or "main", _commit(k))]
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if name in self.server.gated and not is_known:
            self._refuse(401, "GatedRepo", f"Access to {name} is restricted.")
        elif not there:
            self._refuse(404, "RepoNotFound")
        elif not found:
            self._refuse(404, "RevisionNotFound")
        return next(iter(found), None) if name not in self.server.gated or is_known else None

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self._answer(status, {"error": message or code}, **{"X-Error-Code": code})

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

    def _answer(self, status: int, content: Any, **headers: str) -> None:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def _entry(file: str, held: bytes) -> dict[str, Any]:
    return {"type": "file", "oid": _commit(held.hex()), "size": len(held), "path": file}


@contextmanager
def hub(cache: Path, *, token: str = TOKEN) -> Iterator[Hub]:
    """Run a hub, and let the client find it and its token.

    Args:
        cache: A folder for what is downloaded.
        token: Of the user.
    """
    with Hub() as server, pytest.MonkeyPatch.context() as patch:
        _point_to(server.address, patch, cache)
        patch.setenv("HF_TOKEN", token)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            huggingface_hub.close_session()


@contextmanager
def no_hub(cache: Path) -> Iterator[None]:
    """No network: nothing answers, and the client must not wait to try again."""
    with Hub() as server:
        address = server.address

    def tries_again(seconds: float) -> None:
        pytest.fail(f"the hub is asked again after {seconds} s")

    waits_not = SimpleNamespace(**{**vars(time), "sleep": tries_again})
    with pytest.MonkeyPatch.context() as patch:
        _point_to(address, patch, cache)
        patch.setattr(_http, "time", waits_not)
        yield


def _point_to(address: str, patch: pytest.MonkeyPatch, cache: Path) -> None:
    """What HF_ENDPOINT and HF_HOME set before the client is imported."""
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "ENDPOINT", address)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(hf_api.api, "endpoint", address)
    patch.setattr(transformers_hub, "_hf_api", None)  # made anew
    patch.setattr(datasets.config, "HF_ENDPOINT", address)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
    patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache / "modules"))
    patch.setattr(sys, "path", [*sys.path])  # transformers adds its folder of modules
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # it keeps a log open
