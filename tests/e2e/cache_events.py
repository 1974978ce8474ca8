"""A publisher of KV cache events as vLLM's: a PUB socket (ZMTP 3.0, NULL) with msgpack batches, and its replay socket."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
REPLAY_END = (-1).to_bytes(8, "big", signed=True)


def pack(value) -> bytes:
    """msgpack, as far as events need it."""
    match value:
        case None:
            return b"\xc0"
        case int():
            return b"\xcf" + struct.pack(">Q", value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            return b"\xd9" + bytes([len(value)]) + value.encode()
        case list():
            return b"\xdd" + struct.pack(">I", len(value)) + b"".join(pack(item) for item in value)
    raise TypeError(type(value))


class Publisher:
    """Both sockets of one server, and what was published."""

    def __init__(self, block: int = 16):
        self.block = block
        self.batches: list[bytes] = []
        self.subscribers: list[socket.socket] = []
        self.lock = threading.Lock()
        self.sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.events, self.replay = (f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in self.sockets)
        for one, serve in zip(self.sockets, (self._subscribe, self._replay), strict=True):
            threading.Thread(target=self._accept, args=(one, serve), daemon=True).start()

    def stores(self, tokens: list[int]) -> None:
        """Says that the server's cache holds the whole blocks of these tokens."""
        size, parent, events = self.block, None, []
        for at in range(0, len(tokens) - len(tokens) % size, size):
            block = tokens[at : at + size]
            key = hash((parent, *block)) & (2**63 - 1)
            events.append(["BlockStored", [key], parent, block, size, None])
            parent = key
        with self.lock:
            self.batches.append(pack([0.0, events]))
            for one in self.subscribers:
                with contextlib.suppress(OSError):
                    one.sendall(self._batch(len(self.batches) - 1))

    def close(self) -> None:
        for one in [*self.sockets, *self.subscribers]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _batch(self, number: int, front: tuple[bytes, ...] = ()) -> bytes:
        return frames(*front, b"kv-events", number.to_bytes(8, "big"), self.batches[number])

    def _accept(self, listener: socket.socket, serve) -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greeted, args=(one, serve), daemon=True).start()

    def _greeted(self, one: socket.socket, serve) -> None:
        with contextlib.suppress(OSError, EOFError):
            one.sendall(GREETING)
            whole(one, len(GREETING))
            kind = b"PUB" if serve == self._subscribe else b"ROUTER"
            ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
            one.sendall(b"\x04" + bytes([len(ready)]) + ready)
            message(one)
            serve(one)

    def _subscribe(self, one: socket.socket) -> None:
        message(one)
        with self.lock:
            self.subscribers.append(one)

    def _replay(self, one: socket.socket) -> None:
        asked = message(one)
        with self.lock:
            for number in range(int.from_bytes(asked[-1], "big"), len(self.batches)):
                one.sendall(self._batch(number, (b"",)))
            one.sendall(frames(b"", b"", REPLAY_END, b""))


def frames(*parts: bytes) -> bytes:
    """A message of these parts."""
    out = b""
    for at, part in enumerate(parts):
        more = at + 1 < len(parts)
        out += bytes([2 | more]) + struct.pack(">Q", len(part)) + part
    return out


def message(one: socket.socket) -> list[bytes]:
    """The next message or command."""
    parts = []
    while True:
        flags = whole(one, 1)[0]
        size = struct.unpack(">Q", whole(one, 8))[0] if flags & 2 else whole(one, 1)[0]
        parts.append(whole(one, size))
        if not flags & 1:
            return parts


def whole(one: socket.socket, size: int) -> bytes:
    out = b""
    while len(out) < size:
        part = one.recv(size - len(out))
        if not part:
            raise EOFError
        out += part
    return out
