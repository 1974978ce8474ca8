"""HTTP/1.1 below the mock providers: reads requests, remembers them, writes answers, and misbehaves as told.

One thread per connection. Everything is recorded in `Provider.seen`; what goes wrong is a `Fault`, queued by a test and used up
by one request each.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

# No mock waits longer for anything: a test that is stuck fails by its own deadline first.
PATIENCE_SECONDS = 60.0


class Refused(Exception):
    """The request breaks a rule of the API."""

    def __init__(self, status: int, message: str, kind: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param


@dataclass
class Fault:
    """What goes wrong with one answer. Counts are of events, from 0; the head of a stream has been sent by then."""

    # Answered with this status instead, in the provider's own shape.
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "The mock was told to fail."
    kind: str | None = None
    # This body as it is, with this status and content type, whatever was asked.
    body: bytes | None = None
    content_type: str = "application/json"
    # An error event takes the place of this event; nothing follows.
    error_at: int | None = None
    # The connection is closed (or reset) before this event, without the end of the body.
    cut_at: int | None = None
    reset_at: int | None = None
    # The body ends properly before this event: what a careless proxy makes of a broken stream.
    end_at: int | None = None
    # Silence from this event on, until the client leaves.
    stall_at: int | None = None
    # Seconds before the head, before the first event, between events.
    head_delay: float = 0.0
    first_delay: float = 0.0
    delay: float = 0.0
    # How events are cut into writes: event, byte, whole, odd (7 bytes), line.
    cut: str = "event"
    crlf: bool = False
    # The closing marker ([DONE], message_stop, messageStop) is left out, the body ends properly.
    no_done: bool = False
    # Nothing is read or answered: the connection is closed at once.
    hang_up: bool = False
    # Comments and empty lines between events (SSE only).
    comments: bool = False
    # Called before each event with its number, and before the end of the body: what a test waits for there has happened by then.
    before: Callable[[int], object] = lambda number: None
    # Called before an answer that is not streamed.
    before_whole: Callable[[], object] = lambda: None


@dataclass
class Seen:
    """One request as it came."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    raw: bytes
    at: float
    body: dict | None = None
    # The error that answered it, when it was refused.
    refused: str | None = None
    # Events written, and when the client was seen to have left.
    written: int = 0
    left_at: float | None = None
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class Reply:
    """A whole answer."""

    body: object
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Stream:
    """A streamed answer: its events as bytes, what an error event looks like, and how many of the last events only close it."""

    events: list[bytes]
    error: bytes
    closing: int = 0
    content_type: str = "text/event-stream"
    headers: dict[str, str] = field(default_factory=dict)


class Provider:
    """A running mock. Subclasses answer; tests look at `seen` and queue `faults`."""

    # The key that the gateway must present, and nobody else may ever see.
    key = "sk-upstream-secret"
    # Served models.
    models: tuple[str, ...] = ("mock-model",)

    def __init__(self):
        self.seen: list[Seen] = []
        self.faults: deque[Fault] = deque()
        # Used where no fault is queued.
        self.manner = Fault()
        self.connections = 0
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.provider = self
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def fail(self, fault: Fault | None = None, times: int = 1, **fields) -> None:
        """The next request goes wrong."""
        self.faults.extend([fault or Fault(**fields)] * times)

    @contextlib.contextmanager
    def behaving(self, **fields) -> Iterator[None]:
        """All requests in a `with` are answered in this manner."""
        before, self.manner = self.manner, Fault(**fields)
        try:
            yield
        finally:
            self.manner = before

    def reset(self) -> None:
        self.seen.clear()
        self.faults.clear()
        self.manner = Fault()

    @property
    def last(self) -> Seen:
        return self.seen[-1]

    # What a dialect implements.

    def check_key(self, seen: Seen) -> None:
        """Refuses a wrong key."""
        raise NotImplementedError

    def answer(self, seen: Seen) -> Reply | Stream:
        """Answers a request that has a good key."""
        raise NotImplementedError

    def error(self, refused: Refused) -> Reply:
        """An error in the shape of the API."""
        raise NotImplementedError


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    provider: Provider

    def handle_error(self, request, client_address):
        """A client that leaves is no news here: `Seen` tells."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self):
        super().setup()
        self.connection.settimeout(PATIENCE_SECONDS)
        self.server.provider.connections += 1

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._serve()

    def do_POST(self):
        self._serve()

    def do_DELETE(self):
        self._serve()

    def _serve(self) -> None:
        provider = self.server.provider
        url = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(self.command, url.path, parse_qs(url.query), headers, self._read_body(headers), time.monotonic())
        fault = provider.faults.popleft() if provider.faults else provider.manner
        provider.seen.append(seen)
        try:
            self._answer(provider, seen, fault)
        except (OSError, _Left):
            seen.left_at = seen.left_at or time.monotonic()
            self.close_connection = True
        finally:
            seen.done.set()

    def _read_body(self, headers) -> bytes:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(headers.get("content-length", 0)))

    def _answer(self, provider: Provider, seen: Seen, fault: Fault) -> None:
        if fault.hang_up:
            self._hang_up(reset=False)
        self._wait(fault.head_delay, seen)
        if fault.body is not None:
            self._whole(fault.status or 200, fault.body, {"content-type": fault.content_type, **fault.headers}, fault)
            return
        try:
            provider.check_key(seen)
            if fault.status is not None:
                raise Refused(fault.status, fault.message, fault.kind)
            reply = provider.answer(seen)
        except Refused as refused:
            seen.refused = refused.message
            reply = provider.error(refused)
            reply.headers.update(fault.headers)
        if isinstance(reply, Stream):
            self._stream(reply, seen, fault)
        else:
            body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body, ensure_ascii=False).encode()
            self._whole(reply.status, body, {"content-type": "application/json", **reply.headers}, fault)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _whole(self, status: int, body: bytes, headers: dict[str, str], fault: Fault) -> None:
        fault.before_whole()
        self._head(status, {**headers, "content-length": str(len(body))})
        cut = {"event": len(body), "whole": len(body), "byte": 1, "odd": 7, "line": 80}[fault.cut]
        if fault.cut_at is not None or fault.reset_at is not None:
            self.wfile.write(body[: len(body) // 2])
            self._hang_up(reset=fault.reset_at is not None)
        for start in range(0, len(body), max(cut, 1)):
            self.wfile.write(body[start : start + cut])

    def _stream(self, stream: Stream, seen: Seen, fault: Fault) -> None:
        events = list(stream.events)
        if fault.no_done and stream.closing:
            events = events[: -stream.closing]
        if fault.error_at is not None:
            events = [*events[: fault.error_at], stream.error]
        if fault.end_at is not None:
            events = events[: fault.end_at]
        sse = stream.content_type.startswith("text/event-stream")
        if fault.crlf and sse:
            events = [event.replace(b"\n", b"\r\n") for event in events]
        if fault.comments and sse:
            events = [b": keep-alive\n\n" + event for event in events]
        headers = {"content-type": stream.content_type, "transfer-encoding": "chunked", **stream.headers}
        self._head(200, headers)
        self._wait(fault.first_delay, seen)
        if fault.cut == "whole":
            events = [b"".join(events)]
        for number, event in enumerate(events):
            fault.before(number)
            if number == fault.cut_at or number == fault.reset_at:
                self._hang_up(reset=number == fault.reset_at)
            if number == fault.stall_at:
                self._wait(PATIENCE_SECONDS, seen)
            for piece in _cut(event, fault.cut):
                self._chunk(piece)
            seen.written += 1
            self._wait(fault.delay, seen)
        fault.before(len(events))
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, piece: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def _wait(self, seconds: float, seen: Seen) -> None:
        """Waits, and notices when the client leaves meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([self.connection], [], [], left)
            if ready and not self.connection.recv(1, socket.MSG_PEEK):
                seen.left_at = time.monotonic()
                raise _Left
            if ready:
                time.sleep(min(left, 0.001))

    def _hang_up(self, reset: bool) -> None:
        self.wfile.flush()
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        # The files over the socket would keep it open; detached, it closes now and its number cannot be closed twice.
        os.close(self.connection.detach())
        raise _Left


class _Left(Exception):
    """The connection is over."""


def _cut(event: bytes, how: str) -> list[bytes]:
    if how in ("event", "whole"):
        return [event]
    if how == "line":
        return event.splitlines(keepends=True)
    size = 1 if how == "byte" else 7
    return [event[start : start + size] for start in range(0, len(event), size)]


def parse(seen: Seen) -> dict:
    """The body, which must be a JSON object."""
    try:
        body = json.loads(seen.raw)
    except ValueError as fault:
        raise Refused(400, f"We could not parse the JSON body of your request: {fault}") from None
    if not isinstance(body, dict):
        raise Refused(400, "The JSON body is not an object.")
    seen.body = body
    return body


def sse(data: object, event: str | None = None) -> bytes:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {text}\n\n".encode()
