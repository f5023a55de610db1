"""`llmcache kv proxy`: start a llama-server or attach to a running one, and serve clients in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from llmcache.errors import MissingRequirement, UsageError, say
from llmcache.kv.prefix.store import BlockStore
from llmcache.kv.proxy.http import Address
from llmcache.kv.proxy.prompts import Spool
from llmcache.kv.proxy.proxy import Proxy, Served
from llmcache.kv.proxy.server import DEFAULT_PORT, Options, process_at
from llmcache.run.child import Child, resolve
from llmcache.units import format_size

LOOPBACK = "127.0.0.1"
SPOOL = "slots"  # subdirectory of the store for the slot files of a server that this command started
_IDLE_SLOTS = "LLAMA_ARG_CACHE_IDLE_SLOTS"
_END_S = 10.0  # time to store waiting slots after the server has ended


OpenStore = Callable[[], BlockStore]  # called once the options are known to be valid


def start(open_store: OpenStore, words: Sequence[str], listen: str | None) -> int:
    """Start a llama-server behind the proxy, and return its exit code. UsageError; MissingRequirement; NotRunnable."""
    options = Options(words[1:], os.environ)
    addresses = [address_of(listen)] if listen else options.addresses
    if options.unsupported:
        raise UsageError(f"{options.unsupported}: not supported by the proxy", "start it for one model, without TLS")
    program, store = resolve(words[0], os.environ.get("PATH")), open_store()
    spool = store.directory / SPOOL
    with _explained(spool):
        spool.mkdir(mode=0o700, exist_ok=True)
        spooled = Spool(spool)
    behind = Address(LOOPBACK, _free_port())
    # The path is absolute, because a wrapper may start the server in another directory.
    command = [words[0], *options.behind(behind, f"{spool.absolute()}/")]
    proxy = Proxy(behind, options.prefix, options.headers, store, spooled)
    with contextlib.closing(spooled):
        # Otherwise the server moves idle slots to its own prompt cache and clears them. Old servers ignore the variable.
        environment = {_IDLE_SLOTS: "0", **os.environ}
        child = Child(command, program, environment, dies_with_parent=True)
        try:
            asyncio.run(_serve_child(proxy, addresses, child, options))
        finally:
            child.cancel()
    return child.end_alike()


async def _serve_child(proxy: Proxy, addresses: Sequence[Address], child: Child, options: Options) -> None:
    async with _serving(proxy, addresses, options):
        with child.forwarding():
            child.release()
            await _ended(child)


async def _ended(child: Child) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    fd = os.pidfd_open(child.pid)
    try:
        loop.add_reader(fd, ended.set)
        await ended.wait()
        loop.remove_reader(fd)
    finally:
        os.close(fd)
    child.wait()


def attach(open_store: OpenStore, url: str, slots_dir: str, listen: str | None) -> int:
    """Serve in front of a running llama-server until a signal arrives. UsageError; MissingRequirement."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        behind = Address(parts.hostname or "", parts.port or DEFAULT_PORT)
    except ValueError:
        behind = Address("", 0)
    if parts.scheme not in ("", "http") or not behind.host:
        raise UsageError(f"--url: '{url}' is not the address of a server", "for example http://127.0.0.1:8080")
    addresses = [address_of(listen or f"{LOOPBACK}:{DEFAULT_PORT}")]
    if addresses[0].port == behind.port:
        hint = "choose another, for example --listen 127.0.0.1:8081"
        raise UsageError(f"--listen: port {behind.port} is used by the server", hint)
    options = process_at(behind).options
    if options.unsupported:
        raise UsageError(f"{options.unsupported}: not supported by the proxy", "start it for one model, without TLS")
    saved = options.value("--slot-save-path", variable="LLAMA_ARG_SLOT_SAVE_PATH")
    if saved is None:
        raise UsageError("the server does not save slots", "start it with --slot-save-path DIR, and give DIR as --slots-dir")
    store = open_store()
    with _explained(Path(slots_dir)):
        spooled = Spool(Path(slots_dir))
    proxy = Proxy(behind, (parts.path or options.prefix).rstrip("/"), options.headers, store, spooled)
    with contextlib.closing(spooled):
        return asyncio.run(_until_signal(proxy, addresses, options))


async def _until_signal(proxy: Proxy, addresses: Sequence[Address], options: Options) -> int:
    loop, signals = asyncio.get_running_loop(), asyncio.Queue[int]()
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) != signal.SIG_IGN:
            loop.add_signal_handler(each, signals.put_nowait, each)
    async with _serving(proxy, addresses, options):
        number = await signals.get()
    return 128 + number


@contextlib.asynccontextmanager
async def _serving(proxy: Proxy, addresses: Sequence[Address], options: Options) -> AsyncIterator[None]:
    servers = []
    for address in addresses:
        try:
            servers.append(await proxy.listen(address))
        except OSError as error:
            hint = "choose another --port, or stop the program that uses this one"
            raise MissingRequirement(f"cannot listen at {address}: {error.strerror}", hint) from None
        bound = servers[-1].sockets[0].getsockname()
        say(f"listening at http://{Address(bound[0], bound[1])} for the server at {proxy.address}")
    if own := options.own_cache:
        say(f"the server has a persistent prompt cache of its own ({own}): nothing is stored or restored here")
        watching = None
    else:
        proxy.on_identified, proxy.on_refused = _report, _refusals()
        watching = asyncio.ensure_future(proxy.watch())
    try:
        yield
    finally:
        for server in servers:
            server.close()
        if watching is not None:
            watching.cancel()
        await proxy.close(_END_S)
        _summarize(proxy)


def _report(served: Served) -> None:
    info, prompts = served.identity.described, served.prompts
    size = sum(e.size_bytes for e in prompts.store.entries() if e.key.model == prompts.fingerprint)
    kinds = ", windows or recurrent layers: partly reused where the ending differs" if prompts.states_only else ""
    say(f"{info['file']} (build {info['build']}{kinds}): {format_size(size)} of prompts stored as {prompts.fingerprint[:8]}")


def _refusals() -> Callable[[Exception], None]:
    reported: set[str] = set()

    def report(error: Exception) -> None:
        if (text := str(error)) not in reported:
            reported.add(text)
            say(f"nothing is stored or restored: {text}")
            if hint := getattr(error, "hint", None):
                say(f"hint: {hint}")

    return report


def _summarize(proxy: Proxy) -> None:
    own = proxy.counters
    passed = ", ".join(f"{count}: {reason}" for reason, count in own.passed.most_common())
    text = (
        f"requests: {own.requests:,}; restored: {own.hits:,} ({own.reused_tokens:,} tokens reused); stored: {own.stored:,}"
    )
    say(text + (f"; forwarded without a look-up: {passed}" if passed else ""))


def address_of(text: str) -> Address:
    """Return the address that `--listen` names: HOST:PORT, [HOST]:PORT or PORT. UsageError."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or LOOPBACK
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--listen: '{text}' is not an address", "for example 127.0.0.1:8080")
    return Address(host, int(port))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MissingRequirement(f"{directory}: {error.strerror}", "give a writable directory") from None
