"""Proxy: forwards requests to a llama-server, restores stored prompts into its slots, and saves the slots afterwards.

The proxy processes a completion in these steps:

1. The server computes the tokens (/apply-template, /tokenize), unless an idle slot has the beginning of the text.
2. The completion gets the idle slot with the longest prefix of the prompt, or one into which a longer stored prompt is
   restored.
3. If many tokens are not in the slot, a request without an answer evaluates all but the last. Then the slot is saved; a save
   during an answer would wait until the answer ends. Every answer starts by evaluating one token, so answers from a new, a
   warm and a restored slot are bit-identical. (With a sliding window, the server evaluates the last five tokens again.)
4. The request is forwarded with `id_slot`, otherwise unchanged; the answer is returned byte for byte.
5. After the answer, the slot is saved again if enough of its tokens are new.

All other requests are forwarded unchanged. A failure to store or restore never blocks a request. Everything runs on one
event loop, except for file I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmcache.errors import LlmcacheError, MissingRequirement
from llmcache.kv.prefix import openmetrics
from llmcache.kv.prefix.store import BlockStore
from llmcache.kv.proxy import http
from llmcache.kv.proxy.http import Address, Answer, BadRequest, Request
from llmcache.kv.proxy.prompts import Found, Spool, StoredPrompts, room, tokens_of, uses_states
from llmcache.kv.proxy.server import Identity, Process, identify, process_at
from llmcache.kv.proxy.slots import LEAST_GAIN, Slot, SlotTable, Tokens

log = logging.getLogger("llmcache.kv")

LEAST_TOKENS = 256  # least number of tokens of a prompt that is stored or restored
LEAST_NEW = 128  # a prompt with fewer tokens left is evaluated only by its own request, and not used to measure the speed
NEW_SHARE = 16  # a slot is saved again if 1/16 of its tokens, and at least LEAST_GAIN, are not stored
EARLY_COST = 0.1  # a prompt is saved before its answer if that takes at most this share of the time of its evaluation
MOST_UNDERSTOOD = 64 << 20  # largest body in bytes that the proxy parses
MOST_WAITING = 4  # largest number of slot files in the spool that wait to be stored
MOST_FAILURES = 3  # number of consecutive refused saves after which the proxy no longer saves slots
METRICS = "/llmcache/metrics"
_POLL_S = 0.1
_NATIVE, _CHAT = ("/completion", "/completions", "/v1/completions"), ("/chat/completions", "/v1/chat/completions")
_TIMINGS = re.compile(rb'"timings"\s*:\s*(\{[^{}]*\})')
_FORWARDED = ("Authorization", "X-Api-Key")


@dataclass
class Counters:
    """Counters of the proxy since its start."""

    requests: int = 0
    passed: Counter[str] = field(default_factory=Counter)  # completions forwarded without a look-up, by reason
    lookups: int = 0
    hits: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    restore_s: float = 0.0
    reused_tokens: int = 0  # restored tokens that the server did not evaluate, by its own count
    saved_s: float = 0.0  # estimated time to evaluate the reused tokens, less `restore_s`
    stored: int = 0
    stored_bytes: int = 0
    stored_before_answer: int = 0
    save_s: float = 0.0  # the server cannot compute during a save
    dropped: int = 0


@dataclass
class Served:
    """An identified server."""

    process: Process
    identity: Identity
    adapters: Any
    slots: SlotTable
    prompts: StoredPrompts
    context_tokens: int
    token_s: float = 0.0  # time to evaluate a token; 0 until it is measured
    save_token_s: float = 0.0  # time to save a token
    token_bytes: float = 0.0  # bytes of a token in a slot file
    failed_saves: int = 0  # consecutive failures

    def learn(self, timings: dict[str, Any]) -> None:
        with contextlib.suppress(KeyError, TypeError):
            if timings["prompt_n"] >= LEAST_NEW:
                self.token_s = timings["prompt_ms"] / 1e3 / timings["prompt_n"]


class NotUnderstood(Exception):
    """The reason why a completion is forwarded without a look-up."""


class Proxy:
    """A proxy for the server at `address`, which has the path prefix `prefix` and saves slots in `spool`."""

    def __init__(self, address: Address, prefix: str, headers: dict[str, str], store: BlockStore, spool: Spool) -> None:
        self.address, self.prefix, self.headers = address, prefix, headers
        self.store, self.spool = store, spool
        self.counters = Counters()
        self.served: Served | None = None
        self.on_identified: Any = lambda _served: None
        self.on_refused: Any = lambda _error: None
        self._changed = asyncio.Event()
        self._ended = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._storing = asyncio.Lock()

    # Connections of clients

    async def listen(self, address: Address) -> asyncio.Server:
        loop = asyncio.get_running_loop()

        def protocol() -> _Client:
            return _Client(asyncio.StreamReader(limit=http.MOST_HEAD, loop=loop), self._client, loop=loop)

        return await loop.create_server(protocol, address.host, address.port)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = writer.transport.get_protocol()
        assert isinstance(client, _Client)
        try:
            try:
                while (request := await http.read_request(reader)) and await self._answered(request, client, writer):
                    pass
            except BadRequest as error:
                writer.write(http.error_reply("400 Bad Request", str(error), "invalid_request_error", False))
                await writer.drain()
        except OSError:
            pass  # the client has disconnected
        finally:
            writer.close()

    async def _answered(self, request: Request, client: _Client, writer: asyncio.StreamWriter) -> bool:
        answer, gone = asyncio.ensure_future(self._answer(request, writer)), asyncio.ensure_future(client.gone.wait())
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
            return await answer
        except asyncio.CancelledError:
            return False
        finally:
            gone.cancel()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.head.get("Expect") and request.version == "HTTP/1.1":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        path = request.path.removeprefix(self.prefix)
        if request.path == METRICS and request.method == "GET":
            kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
            writer.write(http.reply("200 OK", self.metrics().encode(), kind, request.keeps_alive))
            await writer.drain()
            return request.keeps_alive
        self.counters.requests += 1
        if request.method == "POST" and path in _NATIVE + _CHAT:
            return await self._complete(request, writer, path in _CHAT)
        keeps = await self._pass(request, writer)
        if request.method == "POST" and path == "/lora-adapters":
            self.served = None
            self._changed.set()
        return keeps

    async def _pass(self, request: Request, writer: asyncio.StreamWriter, seen: list[Answer] | None = None) -> bool:
        head_sent = False
        try:
            async with self.address.sent(request) as answer:
                if seen is not None:
                    seen.append(answer)
                keeps = request.keeps_alive and answer.has_end
                writer.write(answer.head.encode(**({} if keeps else {"Connection": "close"})))
                head_sent = True
                async for part in answer.parts():
                    writer.write(part)
                    await writer.drain()
                return keeps and answer.is_whole
        except OSError:
            if head_sent:
                return False  # the client detects that the answer is incomplete
            keeps = request.keeps_alive and request.is_whole
            writer.write(http.error_reply("503 Service Unavailable", "Loading model", "unavailable_error", keeps))
            await writer.drain()
            return keeps

    # Completions

    async def _complete(self, request: Request, writer: asyncio.StreamWriter, is_chat: bool) -> bool:
        await request.read_body(MOST_UNDERSTOOD)
        served = self.served
        try:
            if served is None or not served.process.is_running:
                raise NotUnderstood("the server is not identified yet")
            body = _body(request)
            _check(body, is_chat, served.process.options.caches_prompts)
            headers = {name: value for name in _FORWARDED if (value := request.head.get(name))}
            prompt = await self._prompt(body, is_chat, headers, len(request.body))
            turn = await self._turn(served, prompt, headers)
        except NotUnderstood as reason:
            self.counters.passed[str(reason)] += 1
            if served is not None:
                served.slots.forget_idle()
            return await self._pass(request, writer)
        try:
            if turn.found is not None:
                turn.restored = await self._restore(turn, turn.found)
            if not turn.is_continued and not body.get("return_progress"):
                await self._evaluate(turn)
            request.body = _with_slot(request.body, body, turn.slot.number)
            return await self._pass(request, writer, turn.answers)
        finally:
            self._run(self._finish(turn))

    async def _turn(self, served: Served, prompt: str | Tokens, headers: dict[str, str]) -> _Turn:
        text = prompt if isinstance(prompt, str) else ""
        await self._check_slots(served, headers)
        if text and (slot := served.slots.lease_continued(text)):
            return _Turn(served, slot, slot.tokens, headers, text, is_continued=True)
        tokens = prompt if not isinstance(prompt, str) else await self._tokens(prompt, headers)
        if not LEAST_TOKENS <= len(tokens) <= served.context_tokens:
            tokens = tokens[:0]
        found = await self._found(served, tokens)
        stored = served.prompts.usable(found) if found else 0
        lease = await served.slots.lease(tokens, stored)
        turn = _Turn(served, lease.slot, tokens, headers, text if len(tokens) else "", held=lease.held)
        turn.found = found if stored >= lease.held + LEAST_GAIN else None
        return turn

    async def _check_slots(self, served: Served, headers: dict[str, str]) -> None:
        """Clear the records of slots that the server has cleared for other requests because slots share memory."""
        if not served.slots.is_doubtful(time.monotonic()):
            return
        counts: dict[int, int] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            status, answer = await self.address.call("GET", f"{self.prefix}/slots", None, headers)
            if status == 200:
                counts = {slot["id"]: int(slot["n_prompt_tokens"]) for slot in answer if not slot["is_processing"]}
        served.slots.forget_cleared(counts)

    async def _prompt(self, body: dict[str, Any], is_chat: bool, headers: dict[str, str], size_bytes: int) -> str | Tokens:
        """Return the text or the tokens of a prompt; no tokens if it is too short to be stored. NotUnderstood."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if not is_chat and isinstance(prompt, list):
            if any(type(token) is not int or not 0 <= token < 1 << 31 for token in prompt):
                raise NotUnderstood("the prompt is neither text nor tokens")
            return np.array(prompt, np.int32)
        if size_bytes < LEAST_TOKENS:  # a token has at least one byte
            return np.empty(0, np.int32)
        if is_chat:
            prompt = (await self._request("/apply-template", body, headers)).get("prompt")
        if not isinstance(prompt, str):
            raise NotUnderstood("the prompt is neither text nor tokens")
        return prompt

    async def _tokens(self, text: str, headers: dict[str, str]) -> Tokens:
        answer = await self._request("/tokenize", {"content": text, "add_special": True, "parse_special": True}, headers)
        try:
            return np.array(answer["tokens"], np.int32)
        except (KeyError, ValueError, TypeError, OverflowError):
            raise NotUnderstood("the server cannot tokenize the prompt") from None

    async def _request(self, route: str, body: Any, headers: dict[str, str]) -> dict[str, Any]:
        try:
            status, answer = await self.address.call("POST", self.prefix + route, body, headers)
        except (OSError, ValueError):
            status, answer = 0, None
        if status != 200 or not isinstance(answer, dict):
            raise NotUnderstood(f"the server refuses {route}")
        return answer

    async def _found(self, served: Served, tokens: Tokens) -> Found | None:
        if not len(tokens):
            return None
        self.counters.lookups += 1
        found = await asyncio.to_thread(served.prompts.longest, tokens)
        return found if found and served.prompts.usable(found) >= LEAST_GAIN else None

    async def _restore(self, turn: _Turn, found: Found) -> int:
        started, served = time.perf_counter(), turn.served
        with self.spool.file() as path:
            try:
                size = await asyncio.to_thread(served.prompts.export, found, path)
                if not size or not await self._is_same(served):
                    return 0
                is_restored = await self._taken(turn, found, path)
                if not served.process.is_running or not await self._is_same(served):
                    await self._slot(turn, "erase", path)  # a server with other settings may have loaded it
                    return 0
            except (OSError, ValueError, LlmcacheError) as error:
                log.warning("nothing is restored: %s", error)
                return 0
        if not is_restored:
            turn.slot.record(turn.tokens[:0])
            return 0
        turn.slot.record(found.tokens)
        turn.slot.stored = len(found.tokens)
        self.counters.hits += 1
        self.counters.restored_tokens += found.common
        self.counters.restored_bytes += size
        self.counters.restore_s += time.perf_counter() - started
        turn.restore_s = time.perf_counter() - started
        await asyncio.to_thread(served.prompts.record_use, found, found.common, size)
        return found.common

    async def _taken(self, turn: _Turn, found: Found, path: Path) -> bool:
        """Return whether the server restores the file at `path`. Remove a stored prompt that it rejects.

        If slots share the memory for keys, a large prompt may need that of the idle slots: erase these, and try again.
        """
        for attempt in range(2):
            status, answer = await self._slot(turn, "restore", path)
            if status == 200 and answer.get("n_restored") == len(found.tokens):
                return True
            others = turn.served.slots.take_idle() if not attempt else []
            for slot in others:
                await self.address.call("POST", f"{self.prefix}/slots/{slot.number}?action=erase", {}, turn.headers)
                slot.record(turn.tokens[:0])
            for slot in others:
                await turn.served.slots.release(slot)
        if turn.served.slots.busy == 1:
            log.warning("the server rejects a stored prompt of %d tokens, which is removed", len(found.tokens))
            turn.served.prompts.drop(found)
        return False

    async def _evaluate(self, turn: _Turn) -> None:
        first = turn.tokens[:-1]
        if len(first) - max(turn.restored, turn.held) < LEAST_NEW:
            return
        body: dict[str, Any] = {"prompt": first.tolist(), "n_predict": 0, "cache_prompt": True, "id_slot": turn.slot.number}
        body["stream"] = True  # the server looks for a disconnected client only then
        request = self.address.request("POST", f"{self.prefix}/completion", body, turn.headers)
        try:
            async with self.address.sent(request) as answer:
                async for _ in answer.parts():
                    pass
        except OSError:
            return  # the request itself will report the error
        timings = _timings(answer.tail)
        if answer.head.status != 200 or timings is None:
            return
        cached, evaluated_s = int(timings["cache_n"]), float(timings.get("prompt_ms", 0.0)) / 1e3
        turn.slot.record(first)
        turn.served.learn(timings)
        self._count_reuse(turn, cached)
        if len(first) * turn.served.save_token_s <= EARLY_COST * evaluated_s and self._is_worth(turn.slot, len(first)):
            self.counters.stored_before_answer += await self._save(turn)

    def _count_reuse(self, turn: _Turn, cached: int) -> None:
        if turn.restored:
            reused = min(cached, turn.restored)
            self.counters.reused_tokens += reused
            self.counters.saved_s += max(0.0, reused * turn.served.token_s - turn.restore_s)
            turn.restored = 0

    async def _finish(self, turn: _Turn) -> None:
        try:
            answer = turn.answers[0] if turn.answers else None
            if answer is None or answer.head.status != 200 or not len(turn.tokens):
                if answer is None or answer.head.status == 200:
                    turn.slot.record(turn.tokens[:0])
                return
            turn.slot.record(turn.tokens, turn.text)
            timings = _timings(answer.tail)
            if timings is None:  # the answer was not read completely
                count = len(turn.tokens) + answer.tail.count(b"data: ")
                turn.slot.answered = 0
            else:
                if turn.is_continued:
                    turn.slot.record(turn.tokens[: timings["cache_n"]], turn.text)
                turn.slot.answered = timings["predicted_n"]
                count = timings["cache_n"] + timings["prompt_n"] + timings["predicted_n"] - 1
                self._count_reuse(turn, int(timings["cache_n"]))
                turn.served.learn(timings)
            if count >= turn.served.context_tokens - 1:  # after a context shift, the keys belong to other tokens
                turn.slot.record(turn.tokens[:0])
            elif self._is_worth(turn.slot, count):
                await self._save(turn)
        finally:
            await turn.served.slots.release(turn.slot)

    @staticmethod
    def _is_worth(slot: Slot, count: int) -> bool:
        return count - slot.stored >= max(LEAST_GAIN, count // NEW_SHARE)

    # Saving

    async def _save(self, turn: _Turn) -> bool:
        served = turn.served
        if served.failed_saves >= MOST_FAILURES:  # for example, with a projector for images
            return False
        if self._waiting >= MOST_WAITING or self.served is not served:
            self.counters.dropped += 1
            return False
        if reason := room(self.store, int(turn.slot_tokens * served.token_bytes)):
            log.warning("a prompt of %d tokens is not stored: %s", turn.slot_tokens, reason)
            self.counters.dropped += 1
            return False
        stack = contextlib.ExitStack()
        path = stack.enter_context(self.spool.file())
        with contextlib.ExitStack() as failed:
            failed.push(stack)
            started = time.perf_counter()
            try:
                status, answer = await self._slot(turn, "save", path)
                if status != 200 or not path.is_file() or path.stat().st_size != answer.get("n_written"):
                    served.failed_saves += 1
                    raise MissingRequirement(f"the server does not save a slot: {str(answer)[:200]}")
                served.failed_saves = 0
                tokens = await asyncio.to_thread(tokens_of, path)
                served.token_bytes = path.stat().st_size / len(tokens)
            except (OSError, ValueError, LlmcacheError) as error:
                log.warning("%s", error)
                self.counters.dropped += 1
                return False
            seconds = time.perf_counter() - started
            if not served.process.is_running or not await self._is_same(served):
                return False
            failed.pop_all()
        self.counters.save_s += seconds
        served.save_token_s = seconds / len(tokens)
        turn.slot.record(tokens, turn.slot.text)
        turn.slot.stored = len(tokens)
        self._waiting += 1
        self._run(self._store(served, path, tokens, stack))
        return True

    async def _store(self, served: Served, path: Path, tokens: Tokens, stack: contextlib.ExitStack) -> None:
        try:
            with stack:
                async with self._storing:
                    written = await asyncio.to_thread(served.prompts.keep, path, tokens, served.token_s)
                self.counters.stored += bool(written)
                self.counters.stored_bytes += written
        except (OSError, LlmcacheError) as error:
            log.warning("a prompt of %d tokens is not stored: %s", len(tokens), error)
            self.counters.dropped += 1
        finally:
            self._waiting -= 1

    async def _slot(self, turn: _Turn, action: str, path: Path) -> tuple[int, dict[str, Any]]:
        target = f"{self.prefix}/slots/{turn.slot.number}?action={action}"
        status, answer = await self.address.call("POST", target, {"filename": path.name}, turn.headers)
        if not isinstance(answer, dict):
            raise ValueError("the server returned an unexpected answer")
        return status, answer

    async def _is_same(self, served: Served) -> bool:
        """Return whether the server still has the same settings; clients can change adapters while it runs."""
        if self.served is not served:
            return False
        return not served.adapters or await self._adapters() == served.adapters

    async def _adapters(self) -> Any:
        status, answer = await self.address.call("GET", f"{self.prefix}/lora-adapters", None, self.headers)
        return answer if status == 200 else None

    # The server

    async def watch(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._healthy()
                self.served = await self._identified()
                self.on_identified(self.served)
            except (LlmcacheError, OSError, ValueError) as error:
                self.on_refused(error)
                await asyncio.sleep(5.0)
                continue
            while self.served is not None and self.served.process.is_running:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 1.0)
            self.served = None

    async def _healthy(self) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):
                status, _ = await self.address.call("GET", f"{self.prefix}/health")
                if status == 200:
                    return
            await asyncio.sleep(_POLL_S)

    async def _identified(self) -> Served:
        process = await asyncio.to_thread(process_at, self.address)
        status, props = await self.address.call("GET", f"{self.prefix}/props", None, self.headers)
        if status != 200 or not isinstance(props, dict):
            raise MissingRequirement(f"/props returned status {status}", "start the proxy with the server's --api-key")
        adapters = await self._adapters()
        context = int(props.get("default_generation_settings", {}).get("n_ctx", 0))
        identity = await asyncio.to_thread(identify, process, props, adapters, context, self._ended)
        states_only = await asyncio.to_thread(uses_states, identity.model)
        prompts = StoredPrompts(self.store, identity.fingerprint, identity.described, states_only)
        slots = SlotTable(int(props.get("total_slots", 1)))
        token_s = self.store.description(identity.fingerprint).get("token_s")
        known = float(token_s) if isinstance(token_s, int | float) else 0.0
        return Served(process, identity, adapters, slots, prompts, context, known)

    # Background tasks and metrics

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a slot is not saved", exc_info=error)

    async def close(self, timeout_s: float = 60.0) -> None:
        self._ended.set()
        while self._tasks:
            _, left = await asyncio.wait(set(self._tasks), timeout=timeout_s)
            if left:
                break

    def metrics(self) -> str:
        own = self.counters
        rows = (
            ("lookups", "", own.lookups, "Prompts that were looked up"),
            ("hits", "", own.hits, "Prompts of which a prefix was restored"),
            ("restored_tokens", "", own.restored_tokens, "Tokens of prompts that were restored"),
            ("restored_bytes", "bytes", own.restored_bytes, "Bytes of states that were restored"),
            ("restore_seconds", "seconds", own.restore_s, "Time of restoring"),
            ("reused_tokens", "", own.reused_tokens, "Restored tokens that the server did not evaluate, by its own count"),
            (
                "saved_seconds",
                "seconds",
                own.saved_s,
                "Time that their evaluation would have taken, less the time of restoring (modelled)",
            ),
            ("stored_blocks", "", own.stored, "States stored"),
            ("stored_bytes", "bytes", own.stored_bytes, "Bytes stored"),
            ("early_blocks", "", own.stored_before_answer, "States saved before the answer began"),
            ("save_seconds", "seconds", own.save_s, "Time in which the server saved slots"),
            ("dropped_blocks", "", own.dropped, "States not stored: no space, a full queue, or an error"),
            ("evicted_blocks", "", self.store.evicted, "States removed by this process"),
            ("requests", "", own.requests, "Requests"),
            ("passed_requests", "", sum(own.passed.values()), "Completions forwarded without a look-up"),
        )
        return openmetrics(rows)


@dataclass
class _Turn:
    served: Served
    slot: Slot
    tokens: Tokens
    headers: dict[str, str]
    text: str = ""  # text of the prompt, if known
    is_continued: bool = False  # nearly all of the prompt was in the slot, so it was not tokenized
    held: int = 0  # tokens of the prompt that were in the slot
    found: Found | None = None  # the stored prompt to restore
    restored: int = 0
    restore_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    @property
    def slot_tokens(self) -> int:
        return max(len(self.tokens), len(self.slot.tokens))


class _Client(asyncio.StreamReaderProtocol):
    """The connection of a client; `gone` is set when the client closes it."""

    def __init__(self, reader: asyncio.StreamReader, connected: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, connected, loop=loop)
        self.gone = asyncio.Event()

    def eof_received(self) -> bool | None:
        self.gone.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        super().connection_lost(exc)


def _body(request: Request) -> dict[str, Any]:
    if not request.is_whole:
        raise NotUnderstood("the request is larger than 64 MiB")
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError):
        raise NotUnderstood("the request is not a JSON object") from None
    if not isinstance(body, dict):
        raise NotUnderstood("the request is not a JSON object")
    return body


def _check(body: dict[str, Any], is_chat: bool, caches_prompts: bool) -> None:
    if any(body.get(name, 1) not in (1, None) for name in ("n", "n_cmpl")):
        raise NotUnderstood("the request has n > 1")
    if body.get("lora"):
        raise NotUnderstood("the request selects LoRA adapters")
    if body.get("id_slot", -1) not in (-1, None):
        raise NotUnderstood("the request selects a slot")
    if body.get("cache_prompt", caches_prompts) is False:
        raise NotUnderstood("the request disables cache_prompt")
    if not is_chat:
        return
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise NotUnderstood("the request has no messages")
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise NotUnderstood("the request has images or audio")


def _with_slot(data: bytes, body: dict[str, Any], slot: int) -> bytes:
    if "id_slot" in body:
        return json.dumps({**body, "id_slot": slot}).encode()
    before, brace, rest = data.partition(b"{")
    return before + brace + f'"id_slot":{slot},'.encode() + rest


def _timings(tail: bytes) -> dict[str, Any] | None:
    try:
        timings = json.loads(_TIMINGS.findall(tail)[-1])
        return timings if all(type(timings[name]) is int for name in ("cache_n", "prompt_n", "predicted_n")) else None
    except (IndexError, ValueError, KeyError):
        return None
