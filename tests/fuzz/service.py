"""A control socket with everything behind it: a real engine over real files, its kernel a modelled one."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmcache.fs.client import control
from llmcache.fs.daemon.controlserver import ControlServer, Requests
from llmcache.fs.engine import warmup
from llmcache.fs.engine.engine import Engine
from llmcache.fs.engine.warmup import Warmer
from llmcache.fs.vfs.operations import LlmcacheOperations
from llmcache.fs.vfs.source import SourceTree, WritePolicy
from tests.property.kernel import open_backing
from tests.property.rig import running

POINT = "/nowhere"
SMALL = {"a.gguf": 9000, "b.kv": 1, "empty.bin": 0, "é ü.json": 300}


@dataclass
class Service:
    """A server, the engine it serves, and what either logged as an error."""

    directory: Path
    engine: Engine
    requests: Requests
    server: ControlServer
    errors: list[str] = field(default_factory=list)

    @property
    def socket(self) -> str:
        """Path of the socket."""
        return control.files(POINT).socket


class _Errors(logging.Handler):
    """Collects what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@contextmanager
def service(mode: str = "arena") -> Iterator[Service]:
    """A service; on the way out, everything ends."""
    errors, log = _Errors(), logging.getLogger("llmcache")
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        directory = Path(name)
        source = directory / "source"
        source.mkdir()
        for file, size in SMALL.items():
            (source / file).write_bytes(b"x" * size)
        patch.setattr(control, "directory", lambda _uid: name)
        patch.setattr(warmup, "ATTACH_S", 0.02)  # the modelled kernel has no page of what nobody reads
        log.addHandler(errors)
        with running(source, mode, patch) as rig:
            for file in SMALL:
                rig.kernel.add(open_backing(f"/{file}", source / file))
            tree = SourceTree(str(source))
            operations = LlmcacheOperations(tree, rig.engine, rig.reader, WritePolicy())
            requests = Requests(rig.engine, Warmer(rig.engine, operations, tree))
            server = ControlServer(control.files(POINT), requests.answer)
            try:
                yield Service(directory, rig.engine, requests, server, errors.texts)
            finally:
                server.close()
                log.removeHandler(errors)
