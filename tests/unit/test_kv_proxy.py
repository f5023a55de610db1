"""The parts of `llmcache kv proxy` that need no server: options, identity, slots, slot files, HTTP."""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from llmcache import cli
from llmcache.errors import DataError, MissingRequirement, UsageError
from llmcache.kv.prefix import common_length
from llmcache.kv.prefix.store import WHOLE, BlockKey, BlockStore
from llmcache.kv.proxy import http, prompts, proxy
from llmcache.kv.proxy.command import address_of
from llmcache.kv.proxy.http import Address, Answer, BadRequest
from llmcache.kv.proxy.prompts import Found, StoredPrompts, tokens_of, uses_states
from llmcache.kv.proxy.server import Options
from llmcache.kv.proxy.slots import Slot, SlotTable, Tokens, choose
from llmcache.kv.spill.checksum import RunningChecksum, checksums

FINGERPRINT = "0" * 32


def options(text: str, **environment: str) -> Options:
    return Options(text.split(), environment)


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


def slot_file(path: Path, tokens: Tokens, payload: bytes = b"state", packed: bool = True) -> Path:
    words = [-1, 1, len(tokens), *tokens.tolist(), 0] if packed else tokens.tolist()
    path.write_bytes(struct.pack(f"<III{len(words)}i", 0x67677371, 4, len(words), *words) + payload)
    return path


def test_the_address_is_that_of_the_server() -> None:
    assert options("-m x").addresses == [Address("127.0.0.1", 8080)]
    assert options("--port 1 --host ::1 --port 2").addresses == [Address("::1", 2)]
    assert options("-m x", LLAMA_ARG_HOST="0.0.0.0,::1", LLAMA_ARG_PORT="81").addresses == [
        Address("0.0.0.0", 81),
        Address("::1", 81),
    ]
    assert str(Address("::1", 2)) == "[::1]:2"
    for bad in ("--port x", "--port 70000", "--host /run/x.sock"):
        with pytest.raises(UsageError):
            _ = options(bad).addresses
    assert address_of("81") == Address("127.0.0.1", 81) and address_of("[::1]:81") == Address("::1", 81)
    with pytest.raises(UsageError):
        address_of("host:port")


def test_the_server_is_started_with_another_address() -> None:
    words = options("-m x --host 0.0.0.0 --port 80 --slot-save-path /y/ -c 1").behind(Address("127.0.0.1", 9), "/spool/")
    assert words == ["-m", "x", "-c", "1", "--host", "127.0.0.1", "--port", "9", "--slot-save-path", "/spool/"]


@pytest.mark.parametrize(
    ("text", "environment", "counting"),
    [
        ("-m x -c 4096 --port 1 -t 4 --metrics --api-key secret", {}, ["-m", "x", "-c", "4096"]),
        ("--temp 0.5 -n -1 --seed 3 -ctk q8_0", {}, ["-ctk", "q8_0"]),
        ("--rope-scale -2 --unknown", {}, ["--rope-scale", "-2", "--unknown"]),
        ("--verbose -c 1", {}, ["-c", "1"]),
        ("--threads -c 1", {}, ["-c", "1"]),
        ("", {"LLAMA_ARG_CTX_SIZE": "1", "LLAMA_ARG_THREADS": "2", "LLAMA_API_KEY": "secret"}, ["LLAMA_ARG_CTX_SIZE=1"]),
        ("", {"GGML_X": "1", "PATH": "/", "LLAMA_ARG_NO_WARMUP": "1"}, ["GGML_X=1"]),
    ],
)
def test_options_that_affect_keys(text: str, environment: dict[str, str], counting: list[str]) -> None:
    assert options(text, **environment).that_count() == counting


def test_other_options(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("first\nsecond\n")
    assert options(f"--api-key-file {key}").headers == {"Authorization": "Bearer first"}
    assert options("--api-key a,b").headers == {"Authorization": "Bearer a"} and options("").headers == {}
    assert options("--api-prefix /llama/").prefix == "/llama"
    assert options("").caches_prompts and not options("--no-cache-prompt").caches_prompts
    assert not options("", LLAMA_ARG_CACHE_PROMPT="0").caches_prompts
    assert options("--cache-disk /x").own_cache == "--cache-disk"
    assert options("", LLAMA_ARG_PROMPT_CACHE_PATH="/x").own_cache == "LLAMA_ARG_PROMPT_CACHE_PATH"
    assert options("--cache-ram 0 --cache-type-k f16 --cache-reuse 1 --cache-prompt").own_cache is None
    assert options("--models-dir x").unsupported == "--models-dir" and options("-m x").unsupported is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either a command after --, or --url and --slots-dir"),
        (["--url", "http://x"], "give either a command after --, or --url and --slots-dir"),
        (["--url", "http://x", "--slots-dir", ".", "--", "true"], "give either a command"),
        (["--url", "https://x:1", "--slots-dir", "."], "is not the address of a server"),
        (["--url", "http://x:1", "--slots-dir", ".", "--listen", "y"], "'y' is not an address"),
        (["--url", "127.0.0.1:1", "--slots-dir", ".", "--listen", "1"], "port 1 is used by the server"),
        (["--", "llama-server", "--port", "x"], "'x' is not a port"),
        (["--", "llama-server", "--models-dir", "x"], "--models-dir: not supported by the proxy"),
        (["--", "no-such-program"], "no such program"),
        (["--url", "127.0.0.1:1", "--slots-dir", "."], "cannot find the server's process"),
    ],
)
def test_bad_calls_are_explained(words: list[str], message: str, tmp_path: Path) -> None:
    error = CliRunner().invoke(cli.app, ["kv", "proxy", str(tmp_path / "kv"), *words]).exception
    assert isinstance(error, UsageError | MissingRequirement) or getattr(error, "exit_code", 0) == 127
    assert message in getattr(error, "message", "") and getattr(error, "hint", None)


def test_the_slot_with_the_longest_prefix_is_chosen() -> None:
    long, other = np.arange(1000, dtype=np.int32), np.arange(5000, 6000, dtype=np.int32)
    first, second, empty = Slot(0, long, 1000, last_use=3), Slot(1, other, 1000, last_use=2), Slot(2)
    assert (choose([first, second, empty], long, 0).slot, choose([first, second], long[:500], 0).held) == (first, 500)
    assert choose([first, second], long, 1000).slot is first, "restoring gains nothing"
    assert choose([first, second, empty], ids(7, *range(900)), 0).slot is empty
    assert choose([first, second], ids(7, 8), 0).slot is second, "used the longest ago"
    second.stored = 0
    assert choose([first, second], ids(7, 8), 0).slot is first, "the other's tokens would be lost"
    half = Slot(3, long[:500], 500, last_use=1)
    assert choose([half, empty], long, 1000).slot is empty, "restoring gains 500 tokens"
    first.record(ids(*range(400), 7))
    assert first.stored == 400
    assert common_length(ids(), long) == common_length(ids(1), ids(2)) == 0 and common_length(ids(1, 2), ids(1, 3)) == 1


def test_a_conversation_continues_in_its_slot() -> None:
    table = SlotTable(2)
    first, second = table.slots
    first.record(np.arange(300, dtype=np.int32), "a" * 900)
    assert table.lease_continued("b" * 900) is None and table.lease_continued("a" * 2000) is None
    first.answered = 50
    second.record(np.arange(100, dtype=np.int32), "a" * 100)
    assert table.lease_continued("a" * 2000) is first
    assert table.lease_continued("a" * 2000) is None, "it is busy, and the other is too short"
    first.is_busy = False
    first.record(ids(1))
    assert table.lease_continued("a" * 900) is second
    table.forget_idle()
    assert first.text == ""


def test_the_tokens_of_a_slot_file(tmp_path: Path) -> None:
    path, tokens = tmp_path / "slot", ids(*range(5, 300))
    for packed in (True, False):
        assert tokens_of(slot_file(path, tokens, packed=packed)).tolist() == tokens.tolist()
    good = slot_file(path, tokens).read_bytes()
    for bad in (
        b"",
        good[:50],
        b"x" + good[1:],
        good[:12] + struct.pack("<i", -2) + good[16:],
        slot_file(path, ids()).read_bytes(),
    ):
        path.write_bytes(bad)
        with pytest.raises(DataError):
            tokens_of(path)


def test_states_are_used_to_their_end(tmp_path: Path) -> None:
    stored = StoredPrompts(BlockStore(tmp_path / "kv", 10**8), FINGERPRINT, {}, states_only=True)
    tokens = np.arange(1000, dtype=np.int32)
    for count in (300, 1000):
        stored.keep(slot_file(tmp_path / "slot", tokens[:count]), tokens[:count], 0.0)
    for count, expected in ((1000, 1000), (400, 300), (900, 1000), (300, 300)):
        found = stored.longest(tokens[:count])
        assert found is not None and len(found.tokens) == expected
    model = tmp_path / "model.gguf"
    for text, expects in ((b"gguf x.attention.head_count", False), (b"gguf gemma3.attention.sliding_window", True)):
        model.write_bytes(text)
        assert uses_states(str(model)) is expects


def test_a_header_of_another_state_is_rejected(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "kv", 10**8)
    stored = StoredPrompts(store, FINGERPRINT, {}, states_only=False)
    tokens = np.arange(300, dtype=np.int32)
    stored.keep(slot_file(tmp_path / "slot", tokens), tokens, 0.0)
    (entry,) = store.entries()
    found = Found(entry.key, tokens + 1, 300)
    assert stored.export(found, tmp_path / "out") == 0, "its tokens are others"
    other = BlockKey(FINGERPRINT, "1" * 40, 299, WHOLE)
    os.rename(store.directory / entry.key.file, store.directory / other.file)
    assert stored.longest(tokens) is None


@pytest.mark.parametrize("sizes", [(0,), (7,), (32,), (33, 31), (100, 1, 2, 64), (8, 8, 8, 8, 8)])
def test_a_checksum_of_pieces_is_that_of_the_whole(sizes: tuple[int, ...]) -> None:
    data, running, at = np.random.default_rng(1).integers(0, 256, sum(sizes), np.uint8), RunningChecksum(), 0
    for size in sizes:
        running.add(data[at : at + size])
        at += size
    padded = np.concatenate([data, np.zeros(-len(data) % 8, np.uint8)])
    assert running.result() == int(checksums(padded[None])[0, 0])


def feed(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=http.MOST_HEAD)
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def bodies(data: bytes) -> list[tuple[str, bytes]]:
    reader, found = feed(data), []
    while request := await http.read_request(reader):
        await request.read_body(1 << 20)
        assert request.is_whole
        found.append((request.target, request.body))
    return found


def test_requests_are_read_one_after_the_other() -> None:
    chunked = (
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
    )
    plain = b"POST /b?c HTTP/1.1\r\ncontent-length: 2\r\n\r\nok"
    read = asyncio.run(bodies(chunked + plain + b"GET /d HTTP/1.0\r\n\r\n"))
    assert read == [("/a", b"abc0123456789"), ("/b?c", b"ok"), ("/d", b"")]


@pytest.mark.parametrize(
    "data",
    [
        b"GET /\r\n\r\n",
        b"GET / SPDY/3\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nname : x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -2\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"GET / HTTP/1.1\r\nend",
    ],
)
def test_malformed_requests_are_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        asyncio.run(bodies(data))


async def read_answer(data: bytes, method: str = "GET") -> Answer:
    reader = feed(data)
    head = await http.read_head(reader)
    assert head is not None
    answer = Answer(head, reader, method)
    async for _ in answer.parts():
        pass
    return answer


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        (b"Content-Length: 2", b"ab", (True, True)),
        (b"Content-Length: 2", b"a", (True, False)),
        (b"Transfer-Encoding: chunked", b"1\r\na\r\n0\r\n\r\n", (True, True)),
        (b"Transfer-Encoding: chunked", b"1\r\na\r\n", (True, False)),
        (b"X: y", b"a", (False, True)),
    ],
)
def test_the_end_of_an_answer_is_detected(headers: bytes, body: bytes, expected: tuple[bool, bool]) -> None:
    answer = asyncio.run(read_answer(b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n\r\n" + body))
    assert (answer.has_end, answer.is_whole) == expected


def test_id_slot_is_the_only_change_of_a_request() -> None:
    data = b' {"prompt": [1], "temperature": 1.50, "a": "\\u00e9"}'
    assert proxy._with_slot(data, {}, 3) == b' {"id_slot":3,"prompt": [1], "temperature": 1.50, "a": "\\u00e9"}'
    assert proxy._with_slot(b'{"id_slot": -1}', {"id_slot": -1}, 3) == b'{"id_slot": 3}'


def test_free_space_is_checked_before_a_slot_is_saved(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "kv", 1000)
    assert prompts.room(store, 999) == "" and "limit" in prompts.room(store, 1001)
    unlimited = BlockStore(tmp_path / "kv", 1 << 62)
    assert "full" in prompts.room(unlimited, 1 << 61)
