"""A hub of models on loopback that answers as Hugging Face's does: the API, small files by itself, large ones by a redirect to another origin
with a signed address; and the faults of one. What it is asked and what it sends is counted."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "5d0f2e8c0e4b5a51e1c5b8d2a9a7c3f4e6b7d8a9"
SIGNATURE = "sig=secret-of-the-address"
# From this size on a file is kept by git-lfs.
LFS_BYTES = 100_000
# Longest wait of an answer that is held: shorter than the silence after which a pull asks again.
HOLD_SECONDS = 25


class Hub:
    """Repositories with one commit each, and the faults that tests switch on."""

    def __init__(self):
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.token: str | None = None
        self.lock = threading.Lock()
        # (origin, method and path, headers) of every request, and bytes sent of each path.
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.sent: dict[str, int] = {}
        # Ranges that are being answered, now and at most.
        self.ranges_now = self.ranges_max = 0
        # Answers that wait for `release`.
        self.held = 0
        self.changed = threading.Condition(self.lock)
        # Faults.
        self.drop_after: int | None = None  # bytes of a large body after which the connection is cut, once per request
        self.drops = 0
        self.corrupt: set[str] = set()  # files of which the next answer has one wrong byte
        self.busy = 0  # answers of the API that are 429 first
        self.ranges = True
        self.salt = ""  # in the tags of the other origin: another one means another file
        self.hold_at: int | None = None  # bytes of a larger body after which the answer waits for `release`
        self.together = 0  # ranges that must have begun before one of them is answered
        self.slow: float = 0.0  # seconds between two pieces of 64 KiB
        self.extra: list[dict] = []  # entries beside the real ones
        self.unsummed = False
        self.lfs_bytes = LFS_BYTES

    def start(self) -> None:
        self.hub = Origin(self, "hub")
        self.cdn = Origin(self, "cdn")
        self.url = self.hub.url

    def stop(self) -> None:
        for origin in (self.hub, self.cdn):
            origin.stop()

    def add(self, repo: str, folder: Path, *names: str) -> None:
        self.repos[repo] = {name: (folder / name).read_bytes() for name in names}

    def sizes(self, repo: str) -> int:
        return sum(len(data) for data in self.repos[repo].values())

    def siblings(self, repo: str) -> list[dict]:
        out = []
        for name, data in self.repos[repo].items():
            blob = blob_sha1(data)
            entry = {"rfilename": name, "size": len(data), "blobId": blob}
            if self.unsummed:
                entry = {"rfilename": name}
            elif len(data) >= self.lfs_bytes:
                entry["lfs"] = {"sha256": digest("sha256", data), "size": len(data), "pointerSize": 134}
            out.append(entry)
        return out + self.extra

    def hold(self) -> None:
        """Waits until `release`; an answer that waits too long goes on."""
        with self.changed:
            self.held += 1
            self.changed.wait_for(lambda: self.hold_at is None, HOLD_SECONDS)
            self.held -= 1

    def release(self) -> None:
        """Lets answers that are held go on, and holds no more."""
        with self.changed:
            self.hold_at = None
            self.changed.notify_all()

    def ranges_of(self, name: str) -> list[tuple[int, int]]:
        """First and last byte of each range that was asked for of a large file, in order."""
        with self.lock:
            asked = [
                headers["range"]
                for there, path, headers in self.asked
                if there == "cdn" and f"/{name}?" in path and "range" in headers
            ]
        return [tuple(map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", text).groups())) for text in asked]

    def headers_to(self, origin: str) -> list[dict[str, str]]:
        with self.lock:
            return [headers for there, _, headers in self.asked if there == origin]


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    hub.start()
    try:
        yield hub
    finally:
        hub.release()
        hub.stop()


@functools.lru_cache(maxsize=64)
def digest(kind: str, data: bytes) -> str:
    return hashlib.new(kind, data).hexdigest()


@functools.lru_cache(maxsize=64)
def blob_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Origin:
    """One origin: the hub itself, or where its large files lie."""

    def __init__(self, hub: Hub, name: str):
        handler = type("Handler", (Handler,), {"hub": hub, "origin": name})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    origin: str

    def log_message(self, *_):
        pass

    def do_GET(self):
        with self.hub.lock:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.hub.asked.append((self.origin, self.path, headers))
        path = urllib.parse.urlsplit(self.path)
        if self.origin == "cdn":
            return self.blob(path)
        if model := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path.path):
            return self.describe(model[1], urllib.parse.unquote(model[2]), path.query)
        if file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path.path):
            return self.resolve(file[1], file[2], urllib.parse.unquote(file[3]))
        return self.refuse(404, "EntryNotFound", "no such route")

    def may(self, repo: str) -> bool:
        """Checks the token; answers if it is wrong."""
        given = self.headers.get("authorization")
        if self.hub.token and given != f"Bearer {self.hub.token}":
            self.refuse(401, "RepoNotFound", "Invalid username or password.")
            return False
        if repo not in self.hub.repos:
            # As the real one: who is not signed in learns nothing about private repositories.
            self.refuse(404 if given else 401, "RepoNotFound", "Repository not found")
            return False
        return True

    def describe(self, repo: str, revision: str, query: str):
        if not self.may(repo):
            return None
        with self.hub.lock:
            busy, self.hub.busy = self.hub.busy, max(0, self.hub.busy - 1)
        if busy:
            return self.refuse(429, "", "slow down", {"Retry-After": "1"})
        if revision not in ("main", "v1", COMMIT, COMMIT[:7]):
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        assert "blobs=true" in query
        gated = "auto" if repo in self.hub.gated else False
        body = {"id": repo, "sha": COMMIT, "gated": gated, "siblings": self.hub.siblings(repo)}
        return self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def resolve(self, repo: str, commit: str, name: str):
        if not self.may(repo):
            return None
        if repo in self.hub.gated:
            return self.refuse(403, "GatedRepo", "Access to model is restricted")
        data = self.hub.repos[repo].get(name)
        if commit != COMMIT or data is None:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        sha1 = blob_sha1(data)
        if len(data) < self.hub.lfs_bytes:
            return self.send_file(name, data, f'"{sha1}"', {"X-Repo-Commit": COMMIT})
        sha256 = digest("sha256", data)
        place = f"{self.hub.cdn.url}/{repo}/{urllib.parse.quote(name)}?{SIGNATURE}"
        linked = {
            "X-Repo-Commit": COMMIT,
            "X-Linked-ETag": f'"{sha256}"',
            "X-Linked-Size": str(len(data)),
            "Location": place,
        }
        return self.answer(302, b"Found", linked)

    def blob(self, path: urllib.parse.SplitResult):
        if path.query != SIGNATURE:
            return self.refuse(403, "", "Request has expired")
        _, org, repo, name = urllib.parse.unquote(path.path).split("/", 3)
        data = self.hub.repos[f"{org}/{repo}"][name]
        return self.send_file(name, data, f'"{digest("md5", data)}{self.hub.salt}"', {})

    def send_file(self, name: str, data: bytes, tag: str, more: dict[str, str]):
        more = {**more, "ETag": tag, "Accept-Ranges": "bytes"}
        start, end, status = 0, len(data), 200
        wanted = self.headers.get("range")
        same = self.headers.get("if-range", tag) == tag
        if wanted and same and self.hub.ranges:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted).groups()
            start, end = int(first), min(int(last) + 1 if last else len(data), len(data))
            if start >= len(data):
                return self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            status, more["Content-Range"] = 206, f"bytes {start}-{end - 1}/{len(data)}"
        body = bytearray(data[start:end])
        with self.hub.lock:
            if name in self.hub.corrupt and body:
                self.hub.corrupt.discard(name)
                body[len(body) // 2] ^= 1
            cut = self.hub.drop_after if self.hub.drops > 0 and len(body) > (self.hub.drop_after or 0) else None
            self.hub.drops -= cut is not None
        if status != 206:
            return self.answer(status, bytes(body), more, name, cut)
        with self.hub.changed:
            self.hub.ranges_now += 1
            self.hub.ranges_max = max(self.hub.ranges_max, self.hub.ranges_now)
            self.hub.changed.notify_all()
            self.hub.changed.wait_for(lambda: self.hub.ranges_max >= self.hub.together, HOLD_SECONDS)
        try:
            return self.answer(status, bytes(body), more, name, cut)
        finally:
            with self.hub.lock:
                self.hub.ranges_now -= 1

    def refuse(self, status: int, code: str, message: str, more: dict[str, str] | None = None):
        return self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": message, **(more or {})})

    def answer(self, status: int, body: bytes, headers: dict[str, str], name: str = "", cut: int | None = None):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if cut is not None:
            body, self.close_connection = body[:cut], True
        at = 0
        while at < len(body):
            hold = self.hub.hold_at
            if name and hold is not None and at == hold:
                self.hub.hold()
            end = min(at + 65536, len(body), hold if hold is not None and at < hold else len(body))
            if self.hub.slow and name:
                time.sleep(self.hub.slow)
            with self.hub.lock:
                # Before they go: whoever has them finds them counted.
                self.hub.sent[name] = self.hub.sent.get(name, 0) + end - at
            try:
                self.wfile.write(body[at:end])
            except OSError:
                self.close_connection = True
                return
            at = end
