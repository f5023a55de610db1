"""HTTP/1.1 over asyncio's streams, for a proxy that forwards bodies unchanged.

Each request to the upstream server has its own connection, which ends with the answer or when the client disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

MOST_HEAD = 256 << 10  # largest size in bytes of a request line with its headers
PART_BYTES = 64 << 10
_END = b"\r\n\r\n"
# Hop-by-hop headers, and `Expect`, which the proxy answers. The headers that frame a body are forwarded.
_HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade", b"expect"}
_NO_BODY = (204, 304)


class BadRequest(Exception):
    """A request is not valid HTTP/1.1; the proxy answers with status 400."""


@dataclass
class Head:
    """The first line of a request or an answer, and its headers."""

    line: bytes
    headers: list[tuple[bytes, bytes]]

    @classmethod
    def parse(cls, data: bytes) -> Head:
        line, *rest = data.split(b"\r\n")
        headers = []
        for each in rest:
            name, colon, value = each.partition(b":")
            if not colon or not name or name != name.strip():
                raise BadRequest("malformed header")
            headers.append((name, value.strip()))
        return cls(line, headers)

    def get(self, name: str) -> str | None:
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), None)

    def encode(self, **changed: str | int) -> bytes:
        """Return the head without hop-by-hop headers; `changed` headers are set (Content_Length=3)."""
        new = {name.replace("_", "-").encode(): str(value).encode() for name, value in changed.items()}
        omitted = _HOP_BY_HOP | {name.lower() for name in new}
        kept = [pair for pair in self.headers if pair[0].lower() not in omitted]
        return b"\r\n".join([self.line, *(name + b": " + value for name, value in (*kept, *new.items())), b"", b""])

    @property
    def body_bytes(self) -> int | None:
        """Size of the body of a request in bytes; None if it is chunked. BadRequest."""
        length, coding = self.get("Content-Length"), self.get("Transfer-Encoding")
        if coding is not None:
            if length is not None or coding.lower() != "chunked":
                raise BadRequest("ambiguous length of the body")
            return None
        if length is None:
            return 0
        if not length.isascii() or not length.isdigit():
            raise BadRequest("Content-Length is not a number")
        return int(length)

    @property
    def status(self) -> int:
        try:
            return int(self.line.split(b" ", 2)[1])
        except (IndexError, ValueError):
            raise BadRequest("an answer without a status") from None


@dataclass
class Request:
    """A request; `parts` yields the rest of the body after `body`."""

    head: Head
    method: str
    target: str
    version: str
    parts: AsyncIterator[bytes] | None  # the rest of the body, after `body`; None: nothing is left
    body: bytes = b""

    @property
    def is_whole(self) -> bool:
        return self.parts is None

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def keeps_alive(self) -> bool:
        connection = (self.head.get("Connection") or "").lower()
        return "close" not in connection and (self.version == "HTTP/1.1" or "keep-alive" in connection)

    async def read_body(self, most_bytes: int) -> None:
        """Read up to about `most_bytes` into `body`. BadRequest; OSError."""
        parts, size = [self.body], len(self.body)
        async for part in self.rest():
            parts.append(part)
            size += len(part)
            if size >= most_bytes:
                break
        self.body = b"".join(parts)

    async def rest(self) -> AsyncIterator[bytes]:
        while self.parts is not None:
            part = await anext(self.parts, None)
            if part is None:
                self.parts = None
            else:
                yield part


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """Return the next head; None if the connection ends before it. BadRequest; OSError."""
    try:
        data = await reader.readuntil(_END)
    except asyncio.IncompleteReadError as error:
        if error.partial.strip():
            raise BadRequest("the headers are incomplete") from None
        return None
    except asyncio.LimitOverrunError:
        raise BadRequest("the headers are too long") from None
    return Head.parse(data.lstrip(b"\r\n")[: -len(_END)])


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """Return the next request, with its body unread; None if the client closed the connection. BadRequest; OSError."""
    head = await read_head(reader)
    if head is None:
        return None
    words = head.line.decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest("malformed first line")
    method, target, version = words
    return Request(head, method, target, version, body_parts(reader, head))


async def body_parts(reader: asyncio.StreamReader, head: Head) -> AsyncIterator[bytes]:
    """Yield the body of the request with this head. BadRequest, also if the body ends early; OSError."""
    left = head.body_bytes
    try:
        if left is None:
            async for part in _chunks(reader):
                yield part
            return
        while left:
            part = await reader.read(min(left, PART_BYTES))
            if not part:
                raise BadRequest("the body ends too early")
            left -= len(part)
            yield part
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        raise BadRequest("malformed body") from None


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0].strip(), 16):
        while size > 0:
            part = await reader.readexactly(min(size, PART_BYTES))
            size -= len(part)
            yield part
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass


class Answer:
    """An answer of the upstream server, read until the connection ends, with its chunk framing."""

    def __init__(self, head: Head, reader: asyncio.StreamReader, method: str) -> None:
        self.head, self._reader = head, reader
        self.has_body = method != "HEAD" and head.status not in _NO_BODY
        self._length = head.get("Content-Length")
        self.is_chunked = "chunked" in (head.get("Transfer-Encoding") or "").lower()
        self.read_bytes, self.tail = 0, b""

    async def parts(self) -> AsyncIterator[bytes]:
        while part := await self._reader.read(PART_BYTES):
            self.read_bytes += len(part)
            self.tail = (self.tail + part)[-PART_BYTES:]
            yield part

    @property
    def has_end(self) -> bool:
        """Whether the body ends in a way that a client detects without the end of the connection."""
        return not self.has_body or self.is_chunked or self._length is not None

    @property
    def is_whole(self) -> bool:
        """Whether the whole body was received, as far as its framing shows."""
        if self.is_chunked and self.has_body:
            return self.tail.endswith(b"0" + _END)
        return not self.has_body or self._length is None or self._length == str(self.read_bytes)

    async def json(self) -> Any:
        data = b"".join([part async for part in self.parts()])
        if not self.is_whole:
            raise ValueError("the answer ends too early")
        if self.is_chunked:
            data = b"".join(_unchunked(data))
        return json.loads(data)


def _unchunked(data: bytes) -> Iterator[bytes]:
    at = 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end].partition(b";")[0], 16)
        if not size:
            return
        yield data[end + 2 : end + 2 + size]
        at = end + 4 + size


@dataclass(frozen=True)
class Address:
    """The TCP address of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @contextlib.asynccontextmanager
    async def sent(self, request: Request) -> AsyncIterator[Answer]:
        """Yield the answer to a request; close the connection afterwards. OSError; BadRequest."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=MOST_HEAD)
        try:
            is_chunked = request.head.body_bytes is None and not request.is_whole
            writer.write(_request_head(request, is_chunked).encode(Connection="close"))
            if request.body:
                writer.write(_chunk(request.body) if is_chunked else request.body)
            async for part in request.rest():
                writer.write(_chunk(part) if is_chunked else part)
                await writer.drain()
            if is_chunked:
                writer.write(b"0" + _END)
            yield Answer(await _answer_head(reader), reader, request.method)
        finally:
            writer.transport.abort()

    def request(self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None) -> Request:
        data = b"" if body is None else json.dumps(body).encode()
        named = {"Host": str(self), "Content-Type": "application/json", **(headers or {})}
        if body is not None:
            named["Content-Length"] = str(len(data))
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
        return Request(Head(f"{method} {target} HTTP/1.1".encode(), pairs), method, target, "HTTP/1.1", None, data)

    async def call(
        self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        async with self.sent(self.request(method, target, body, headers)) as answer:
            return answer.head.status, await answer.json()


async def _answer_head(reader: asyncio.StreamReader) -> Head:
    try:
        head = await read_head(reader)
        while head is not None and 100 <= head.status < 200:
            head = await read_head(reader)
        if head is not None:
            return head
    except BadRequest as error:
        raise ConnectionResetError(str(error)) from None
    raise ConnectionResetError("the server has closed the connection")


def _request_head(request: Request, is_chunked: bool) -> Head:
    if is_chunked or (not request.is_whole and not request.body):
        return request.head
    framing = (b"transfer-encoding", b"content-length")
    headers = [pair for pair in request.head.headers if pair[0].lower() not in framing]
    length = len(request.body) if request.is_whole else request.head.body_bytes
    return Head(request.head.line, [*headers, (b"Content-Length", str(length).encode())])


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def reply(status: str, body: bytes, kind: str, keeps_alive: bool) -> bytes:
    """Return the bytes of an answer with the content type `kind`."""
    connection = "keep-alive" if keeps_alive else "close"
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: {connection}\r\n\r\n"
    return head.encode() + body


def error_reply(status: str, message: str, kind: str, keeps_alive: bool) -> bytes:
    """Return the bytes of an error in the format of llama-server; `kind` is its type."""
    body = {"error": {"code": int(status.split()[0]), "message": message, "type": kind}}
    return reply(status, json.dumps(body).encode(), "application/json; charset=utf-8", keeps_alive)
