"""Identify the llama-server behind the proxy: its process, and everything except the tokens that its keys depend on.

A saved slot is valid for a server with the same fingerprint, which covers:

- the digests of the model and of every other file that the command line names, independent of their paths
- the number of the build, and the digests of the program and its libraries
- all words of the command line and all variables of llama.cpp, except those known not to change keys and values. An
  unknown setting, or another order or spelling of options, leads to another fingerprint, never to wrong prompts.

/props lacks most of this, so it is read from /proc for the process that listens at the server's port.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llmcache.errors import MissingRequirement, UsageError
from llmcache.kv.prefix.identity import FileIdentity
from llmcache.kv.proxy.http import Address
from llmcache.model.tensors import shard_names
from llmcache.procfs import mappings

FORMAT = 1  # version of fingerprints: increase it if their input changes
DEFAULT_PORT = 8080
_ADDRESS = {"--host": "HOST", "--port": "PORT"}
# Options, without dashes, that keys and values do not depend on: those with a value, then those without. Secrets are
# included, because the other options are stored in plain text.
_WITH_VALUES = """
    host port alias a tags path api-key api-key-file api-prefix ssl-key-file ssl-cert-file timeout to threads t
    threads-batch tb threads-http cpu-mask C cpu-range Cr cpu-strict prio poll cpu-mask-batch Cb cpu-range-batch Crb
    cpu-strict-batch prio-batch poll-batch slot-save-path slot-prompt-similarity sps cache-ram cram hf-token hft log-file
    log-colors verbosity lv log-verbosity log-prompts-dir predict n n-predict seed s temp temperature top-k top-p min-p
    top-n-sigma top-nsigma xtc-probability xtc-threshold typical typical-p repeat-last-n repeat-penalty presence-penalty
    frequency-penalty dry-multiplier dry-base dry-allowed-length dry-penalty-last-n dry-sequence-breaker dynatemp-range
    dynatemp-exp mirostat mirostat-lr mirostat-ent samplers sampler-seq sampling-seq logit-bias grammar grammar-file j
    json-schema json-schema-file sse-ping-interval sleep-idle-seconds cors-origins cors-methods cors-headers webui-config
    webui-config-file ui-config ui-config-file mcp-servers-config mcp-servers-json tools media-path reasoning-format
    reasoning-budget reasoning-budget-message
"""
_WITHOUT_VALUES = """
    reuse-port metrics slots no-slots props webui no-webui ui no-ui
    verbose v log-verbose log-disable log-prefix no-log-prefix
    log-timestamps no-log-timestamps log-jsonl no-log-jsonl warmup no-warmup offline perf no-perf ignore-eos escape no-escape
    cache-idle-slots no-cache-idle-slots cache-prompt no-cache-prompt cont-batching cb no-cont-batching nocb show-timings
    no-show-timings cors-credentials no-cors-credentials webui-mcp-proxy no-webui-mcp-proxy ui-mcp-proxy no-ui-mcp-proxy
    agent no-agent
"""
_VALUES, _FLAGS = frozenset(_WITH_VALUES.split()), frozenset(_WITHOUT_VALUES.split())
_OWN_CACHE = r"(LLAMA_ARG_|--)(PROMPT_|KV_)?(CACHE|SLOT_CACHE)_(DISK|DIR|PATH|FILE|SAVE|PERSIST).*"
_PERSISTENT = re.compile(_OWN_CACHE, re.IGNORECASE)
_UNSUPPORTED = ("--models-dir", "--models-preset", "--ssl-key-file")
_NEAR = "run the proxy in the server's container, as its user or as root; or let it start the server: -- llama-server …"
_SEPARATORS = re.compile(r"([,:=])")  # separators of files and scales of adapters
_LIBRARY = re.compile(r"(lib)?(x?llama|ggml|mtmd).*")


@dataclass(frozen=True)
class Options:
    """The command line and the environment of a llama-server."""

    words: Sequence[str]
    environment: Mapping[str, str]

    def value(self, *names: str, variable: str = "") -> str | None:
        places = [place for place, word in enumerate(self.words[:-1]) if word in names]
        return self.words[places[-1] + 1] if places else self.environment.get(variable) or None

    @property
    def addresses(self) -> list[Address]:
        hosts = self.value("--host", variable="LLAMA_ARG_HOST") or "127.0.0.1"
        port = self.value("--port", variable="LLAMA_ARG_PORT") or str(DEFAULT_PORT)
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise UsageError(f"--port: '{port}' is not a port", "give a number up to 65535")
        if hosts.endswith(".sock"):
            raise UsageError(f"--host: '{hosts}': the proxy listens on TCP addresses only", "give an address and --port")
        return [Address(host, int(port)) for host in hosts.split(",")]

    @property
    def prefix(self) -> str:
        return (self.value("--api-prefix", variable="LLAMA_ARG_API_PREFIX") or "").rstrip("/")

    @property
    def headers(self) -> dict[str, str]:
        key = self.value("--api-key", variable="LLAMA_API_KEY")
        if key is None and (file := self.value("--api-key-file", variable="LLAMA_ARG_API_KEY_FILE")):
            key = Path(file).read_text().split("\n")[0]
        return {"Authorization": f"Bearer {key.split(',')[0].strip()}"} if key else {}

    @property
    def caches_prompts(self) -> bool:
        off = self.environment.get("LLAMA_ARG_CACHE_PROMPT", "") in ("0", "false", "off", "disabled")
        return "--no-cache-prompt" not in self.words and not off and "LLAMA_ARG_NO_CACHE_PROMPT" not in self.environment

    @property
    def own_cache(self) -> str | None:
        named = [*(word for word in self.words if word.startswith("--")), *self.environment]
        return next((name for name in named if _PERSISTENT.fullmatch(name.replace("-", "_").replace("__", "--", 1))), None)

    @property
    def unsupported(self) -> str | None:
        return next((word for word in self.words if word in _UNSUPPORTED), None)

    def behind(self, address: Address, spool: str) -> list[str]:
        words, kept = iter(self.words), []
        for word in words:
            if word in _ADDRESS or word == "--slot-save-path":
                next(words, None)
            else:
                kept.append(word)
        return [*kept, "--host", address.host, "--port", str(address.port), "--slot-save-path", spool]

    def that_count(self) -> list[str]:
        """Return the arguments, in their order, and the variables that keys and values may depend on."""
        relevant, is_value = list[str](), False
        for word in self.words:
            name = word.lstrip("-") if word.startswith("-") else ""
            is_option = bool(name) and not name[0].isdigit()
            if not (is_value and not is_option) and name not in _VALUES and (not name or name not in _FLAGS):
                relevant.append(word)
            is_value = name in _VALUES
        for name, value in sorted(self.environment.items()):
            option = name.removeprefix("LLAMA_ARG_").replace("_", "-").lower()
            is_known = name.startswith("LLAMA_LOG") or name in ("LLAMA_API_KEY", "LLAMA_CACHE", "LLAMA_ARG_MODEL")
            if name.startswith(("LLAMA_", "GGML_")) and not is_known and option.removeprefix("no-") not in _VALUES | _FLAGS:
                relevant.append(f"{name}={value}")
        return relevant


class Process:
    """The process of a llama-server. MissingRequirement: it cannot be inspected, or is in another container."""

    def __init__(self, pid: int) -> None:
        try:
            self._process = psutil.Process(pid)
            self.options = Options(self._process.cmdline()[1:], self._process.environ())
            self.directory, self.name = self._process.cwd(), self._process.name()
            is_near = os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
        except (psutil.Error, OSError) as error:
            raise MissingRequirement(f"cannot inspect the server's process {pid}: {error}", _NEAR) from None
        if not is_near:  # its paths are not valid here
            raise MissingRequirement(f"the server's process {pid} is in another container", _NEAR)

    @property
    def is_running(self) -> bool:
        return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def libraries(self) -> list[str]:
        """Return the loaded libraries of llama.cpp, or else the program. MissingRequirement: one was replaced."""
        found = {mapped.path for mapped in mappings(self._process.pid) if _LIBRARY.fullmatch(os.path.basename(mapped.path))}
        found = {path for path in found if ".gguf" not in path and not path.endswith(".bin")}
        with contextlib.suppress(psutil.Error):
            found = found or {self._process.exe()}
        self._check_replaced(found)
        return sorted(found)

    def digest(self, path: str, ended: threading.Event) -> str:
        """Return the digest of a file that the server has loaded. MissingRequirement: it has changed since."""
        self._check_replaced({mapped.path for mapped in mappings(self._process.pid) if mapped.path.startswith(path)})
        with contextlib.suppress(OSError):
            if os.stat(path).st_mtime > self._process.create_time() + 1.0:
                name = os.path.basename(path)
                raise MissingRequirement(f"{name} was changed after the server loaded it", "restart the server")
        return file_digest(path, ended)

    @staticmethod
    def _check_replaced(paths: set[str]) -> None:
        for path in paths:
            if path.endswith(" (deleted)"):
                name = os.path.basename(path.removesuffix(" (deleted)"))
                raise MissingRequirement(f"{name} was replaced after the server loaded it", "restart the server")


def process_at(address: Address) -> Process:
    """Return the process that listens at `address`, an address of this machine. MissingRequirement."""
    with contextlib.suppress(psutil.Error):
        found = [(each.laddr, each.pid) for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        named = [(where.ip, pid) for where, pid in found if where and where.port == address.port and pid]
        named.sort(key=lambda pair: pair[0] != address.host)  # prefer the exact address: several processes may use the port
        if named:
            return Process(named[0][1])
    raise MissingRequirement(f"{address}: cannot find the server's process, whose settings determine its keys", _NEAR)


@dataclass(frozen=True)
class Identity:
    """The fingerprint of a server, the input of the fingerprint, and the path of the model."""

    fingerprint: str
    described: dict[str, Any]
    model: str


def identify(
    process: Process, props: dict[str, Any], adapters: Any, context_tokens: int, ended: threading.Event
) -> Identity:
    """Return the identity of a server with these /props, /lora-adapters and tokens per slot, when its files are hashed.

    MissingRequirement: the server cannot be identified, or `ended` was set; OSError.
    """
    named = props.get("model_path")
    if not isinstance(named, str) or not named or props.get("role") == "router":
        raise MissingRequirement("the server is a router for several models", "start the proxy for each model")
    models = shard_names(process.path(named))

    def with_digests(word: str) -> str:
        parts = _SEPARATORS.split(word)
        paths = [process.path(part) if part else "" for part in parts]
        return "".join(
            process.digest(path, ended) if os.path.isfile(path) else part for part, path in zip(parts, paths, strict=True)
        )

    described = {
        "format": FORMAT,
        "file": os.path.basename(named),
        "files": [process.digest(path, ended) for path in models],
        "build": str(props.get("build_info")),
        "code": [[os.path.basename(path), file_digest(path, ended)] for path in process.libraries()],
        "options": [with_digests(word) for word in process.options.that_count()],
        "adapters": [[each.get("id"), each.get("scale")] for each in adapters] if isinstance(adapters, list) else None,
        "n_ctx": context_tokens,
        "block_tokens": 1,
    }
    hashed = json.dumps({key: value for key, value in described.items() if key != "file"}, sort_keys=True)
    return Identity(hashlib.blake2b(hashed.encode(), digest_size=16).hexdigest(), described, models[0])


def file_digest(path: str, ended: threading.Event) -> str:
    """Return the digest of a file when it is hashed. MissingRequirement."""
    try:
        identity = FileIdentity(path)
        while (digest := identity.digest(0.2)) is None:
            if ended.is_set():
                raise MissingRequirement(f"{path}: not identified yet")
    except OSError as error:
        raise MissingRequirement(f"{path}: {error.strerror}") from None
    return digest
