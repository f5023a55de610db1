"""HTTP/1.1 over asyncio's streams: as much as a proxy needs that passes bodies on as they are.

The upstream server gets a connection for each request, with `Connection: close`, so the end of its answer is the end of the
connection, and a client that disconnects is passed on by closing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

MOST_HEAD = 256 << 10
"""Bytes of a request line and its headers."""
PART_BYTES = 64 << 10
_END = b"\r\n\r\n"
# Of a connection and not of a request. `Expect` is answered here; the framing of an answer's body stays as it is.
_OF_CONNECTION = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade", b"expect"}
_NO_BODY = (204, 304)


class BadRequest(Exception):
    """A request that is no HTTP/1.1: answered with 400."""


@dataclass
class Head:
    """The first line of a request or an answer, and its headers."""

    line: bytes
    headers: list[tuple[bytes, bytes]]

    @classmethod
    def parse(cls, data: bytes) -> Head:
        """Return the head that `data` is, without the empty line at its end. BadRequest."""
        line, *rest = data.split(b"\r\n")
        headers = []
        for each in rest:
            name, colon, value = each.partition(b":")
            if not colon or not name or name != name.strip():
                raise BadRequest("a header cannot be understood")
            headers.append((name, value.strip()))
        return cls(line, headers)

    def get(self, name: str) -> str | None:
        """Return the value of a header; None if there is none."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), None)

    def encode(self, **changed: str | int) -> bytes:
        """Return the bytes of it, without the headers of a connection, and with `changed` ones (Content_Length)."""
        new = {name.replace("_", "-").encode(): str(value).encode() for name, value in changed.items()}
        left_out = _OF_CONNECTION | {name.lower() for name in new}
        kept = [pair for pair in self.headers if pair[0].lower() not in left_out]
        return b"\r\n".join([self.line, *(name + b": " + value for name, value in (*kept, *new.items())), b"", b""])

    @property
    def body_bytes(self) -> int | None:
        """Bytes of the body of a request; None if it is chunked. BadRequest."""
        length, coding = self.get("Content-Length"), self.get("Transfer-Encoding")
        if coding is not None:
            if length is not None or coding.lower() != "chunked":
                raise BadRequest("the length of the body is not clear")
            return None
        if length is None:
            return 0
        if not length.isascii() or not length.isdigit():
            raise BadRequest("Content-Length is no number")
        return int(length)

    @property
    def status(self) -> int:
        """Return the status of an answer. BadRequest."""
        try:
            return int(self.line.split(b" ", 2)[1])
        except (IndexError, ValueError):
            raise BadRequest("an answer without a status") from None


@dataclass
class Request:
    """A request: its head, and the body as far as it was read; `rest` yields what follows."""

    head: Head
    method: str
    target: str
    version: str
    parts: AsyncIterator[bytes] | None  # what follows `body`
    body: bytes = b""

    @property
    def is_whole(self) -> bool:
        """Whether all of the body was read."""
        return self.parts is None

    @property
    def path(self) -> str:
        """Path of the target, without the query."""
        return self.target.partition("?")[0]

    @property
    def keeps_alive(self) -> bool:
        """Whether the client wants to send another request over the connection."""
        wish = (self.head.get("Connection") or "").lower()
        return "close" not in wish and (self.version == "HTTP/1.1" or "keep-alive" in wish)

    async def read_body(self, most_bytes: int) -> None:
        """Read the body into `body`, up to about `most_bytes`; `is_whole` says whether that was all. BadRequest; OSError."""
        parts, size = [self.body], len(self.body)
        async for part in self.rest():
            parts.append(part)
            size += len(part)
            if size >= most_bytes:
                break
        self.body = b"".join(parts)

    async def rest(self) -> AsyncIterator[bytes]:
        """Yield what follows `body`. BadRequest; OSError."""
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
            raise BadRequest("it ends within its headers") from None
        return None
    except asyncio.LimitOverrunError:
        raise BadRequest("its headers are too long") from None
    return Head.parse(data.lstrip(b"\r\n")[: -len(_END)])


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """Return the next request, without its body; None if the client has closed the connection. BadRequest; OSError."""
    head = await read_head(reader)
    if head is None:
        return None
    words = head.line.decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest("its first line cannot be understood")
    method, target, version = words
    return Request(head, method, target, version, body_parts(reader, head))


async def body_parts(reader: asyncio.StreamReader, head: Head) -> AsyncIterator[bytes]:
    """Yield the body that follows the head of a request. BadRequest, if it ends too early; OSError."""
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
        raise BadRequest("the body cannot be understood") from None


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
    """The answer of the upstream server to one request; the body is read as it is framed, until the connection ends."""

    def __init__(self, head: Head, reader: asyncio.StreamReader, method: str) -> None:
        self.head, self._reader = head, reader
        self.has_body = method != "HEAD" and head.status not in _NO_BODY
        self._length = head.get("Content-Length")
        self.is_chunked = "chunked" in (head.get("Transfer-Encoding") or "").lower()
        self.read_bytes, self.tail = 0, b""

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the bytes that follow the head. OSError."""
        while part := await self._reader.read(PART_BYTES):
            self.read_bytes += len(part)
            self.tail = (self.tail + part)[-PART_BYTES:]
            yield part

    @property
    def has_end(self) -> bool:
        """Whether the client sees the end of the body without the end of the connection."""
        return not self.has_body or self.is_chunked or self._length is not None

    @property
    def is_whole(self) -> bool:
        """Whether all of the body has arrived, as far as the answer shows it."""
        if self.is_chunked and self.has_body:
            return self.tail.endswith(b"0" + _END)
        return not self.has_body or self._length is None or self._length == str(self.read_bytes)

    async def json(self) -> Any:
        """Return the body, which is JSON. ValueError; OSError."""
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
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @contextlib.asynccontextmanager
    async def sent(self, request: Request) -> AsyncIterator[Answer]:
        """Send a request with its body, and yield the answer; its connection is closed afterwards. OSError; BadRequest."""
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

    async def call(
        self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return status and JSON of the answer to a request with a JSON body and `headers`. OSError; ValueError."""
        data = b"" if body is None else json.dumps(body).encode()
        named = {"Host": str(self), "Content-Type": "application/json", **(headers or {})}
        if body is not None:
            named["Content-Length"] = str(len(data))
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
        head = Head(f"{method} {target} HTTP/1.1".encode(), pairs)
        request = Request(head, method, target, "HTTP/1.1", None, data)
        async with self.sent(request) as answer:
            return answer.head.status, await answer.json()


async def _answer_head(reader: asyncio.StreamReader) -> Head:
    """The head of the upstream server's answer. OSError: also if it is no answer."""
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
    """The head that is sent for a request: its body has the length of what was read, if that was all of it."""
    if is_chunked or (not request.is_whole and not request.body):
        return request.head
    framing = (b"transfer-encoding", b"content-length")
    headers = [pair for pair in request.head.headers if pair[0].lower() not in framing]
    length = len(request.body) if request.is_whole else request.head.body_bytes
    return Head(request.head.line, [*headers, (b"Content-Length", str(length).encode())])


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def reply(status: str, body: bytes, kind: str, keeps_alive: bool) -> bytes:
    """Return an answer of the proxy itself."""
    connection = "keep-alive" if keeps_alive else "close"
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: {connection}\r\n\r\n"
    return head.encode() + body


def error_reply(status: str, message: str, kind: str, keeps_alive: bool) -> bytes:
    """Return an error in the form of llama-server's own."""
    body = {"error": {"code": int(status.split()[0]), "message": message, "type": kind}}
    return reply(status, json.dumps(body).encode(), "application/json; charset=utf-8", keeps_alive)
