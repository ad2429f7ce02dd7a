"""A Hugging Face Hub on the loopback interface: the few answers of its API that a download asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Repositories as {id: {file: bytes}}; `gated` ids show their list of files, but none of the files."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    downloads: list[str] = field(default_factory=list)  # files whose content was sent
    tokens: set[str] = field(default_factory=set)  # Authorization headers seen
    url: str = ""

    def reply(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to one request."""
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo, rest = "/".join(parts[2:4] if is_api else parts[:2]), parts[4 if is_api else 2 :]
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if is_api:
            return 200, {"Content-Type": "application/json"}, self._listing(repo, tree=rest[:1] == ["tree"])
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        return self._file(method, repo, "/".join(rest[2:]))

    def _file(self, method: str, repo: str, name: str) -> tuple[int, dict[str, str], bytes]:
        content = self.repos[repo].get(name)
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        if method == "GET":
            self.downloads.append(name)
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content

    def _listing(self, repo: str, *, tree: bool) -> bytes:
        files = self.repos[repo].items()
        if tree:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files
            ]
            return json.dumps(entries).encode()
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files]
        return json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}).encode()


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """Serve a FakeHub, which may be filled while it runs."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            hub.tokens.add(self.headers.get("Authorization", ""))
            status, headers, body = hub.reply(self.command, self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD = answer

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
