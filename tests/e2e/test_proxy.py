"""`llmcache kv proxy` in front of the stock server: prompts that survive restarts, crashes and disconnects."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import GEMMA, SMOLLM2
from tools.make_model import main as make_model

pytestmark = pytest.mark.stock

ROOT = Path(__file__).resolve().parents[2]
SERVER = ROOT / "tests/e2e/llama_server.py"
CONTEXT = 2048  # of each of the two slots
TIMEOUT_S = 60


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def prompt(tokens: int, seed: int = 0) -> list[int]:
    words = random.Random(seed)
    return [1, *(words.randrange(300, 1300) for _ in range(tokens - 1))]


TEXT = " ".join(f"word{number % 37} and {number}" for number in range(80))
MESSAGES = [{"role": "user", "content": TEXT}]
GREEDY = {"temperature": 0, "ignore_eos": True}


@dataclass
class Proxied:
    """A running proxy and its server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    directory: Path
    key: str = ""

    def post(self, route: str, body: Any, **more: Any) -> Any:
        """Return the reply to a request, whose status must be 200."""
        status, data = self.request("POST", route, {**body, **more})
        assert status == 200, data
        return json.loads(data)

    def request(self, method: str, route: str, body: Any = None, port: int | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=TIMEOUT_S)
        data = None if body is None else json.dumps(body)
        connection.request(method, route, data, {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"})
        response = connection.getresponse()
        return response.status, response.read()

    def complete(self, tokens: list[int], count: int = 16, **more: Any) -> str:
        return str(self.post("/completion", {"prompt": tokens, "n_predict": count, **GREEDY, **more})["content"])

    def chat(self, **more: Any) -> Any:
        return self.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, **GREEDY, **more})

    def metrics(self) -> dict[str, float]:
        """Return the counters, without the common prefix of their names."""
        lines = [
            line.split() for line in self.request("GET", "/llmcache/metrics")[1].decode().splitlines() if line[0] != "#"
        ]
        return {name.removeprefix("llmcache_prefix_").removesuffix("_total"): float(value) for name, value in lines}

    def wait(self, **least: float) -> dict[str, float]:
        """Return the counters once they have reached the values of `least`."""
        deadline = time.monotonic() + TIMEOUT_S
        while any((found := self.metrics())[name] < value for name, value in least.items()):
            assert time.monotonic() < deadline, (least, found, self.log.read_text())
            time.sleep(0.02)
        return found

    @property
    def server_port(self) -> int:
        return int(self.log.read_text().split("for the server at 127.0.0.1:")[-1].split()[0])

    def server(self) -> int:
        """Return the process of the server."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def states(self) -> list[Path]:
        return sorted(self.directory.glob("*/*.state"))

    def end(self, number: int = signal.SIGTERM) -> int:
        """End the proxy by a signal and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)


Start = Callable[..., Proxied]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make_model([str(path), "--size", "3M"])
    return path


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory of the user, which stores digests of files."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(tiny: Path, digests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a proxy with a server and return it once it has identified the server; `options` are those of the proxy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(digests))
    running: list[Proxied] = []

    def started(*more: str, options: str = "", model: Path = tiny, context: int = 2 * CONTEXT) -> Proxied:
        port, log, directory = free_port(), tmp_path / f"log{len(running)}", tmp_path / "kv"
        words = [sys.executable, str(SERVER), "-m", str(model), "-c", str(context), "-np", "2", "--port", str(port), *more]
        command = [sys.executable, "-m", "llmcache", "kv", "proxy", str(directory), "--floor", "0", *options.split()]
        with open(log, "wb") as stream:
            process = subprocess.Popen([*command, "--", *words], cwd=ROOT, stdout=stream, stderr=stream)
        running.append(Proxied(process, port, log, directory))
        deadline = time.monotonic() + TIMEOUT_S
        while " of prompts stored as " not in log.read_text():
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.02)
        return running[-1]

    yield started
    for each in running:
        each.end(signal.SIGKILL)


def test_prompts_survive_a_restart_of_everything(start: Start, tiny: Path) -> None:
    tokens = prompt(600)
    first = start()
    cold = first.complete(tokens)
    assert first.complete(tokens) == cold, "the warm slot's answer"
    said = first.chat()
    assert first.metrics()["hits"] == 0
    assert first.wait(stored_blocks=2)["early_blocks"] >= 1
    ending = [*tokens[:-9], *prompt(9, seed=1)]
    expected = first.complete(ending)
    assert first.end() == -signal.SIGTERM, "as the server without the proxy"
    assert {path.stat().st_mode & 0o777 for path in first.states()} == {0o600}
    assert first.directory.stat().st_mode & 0o777 == (first.directory / "slots").stat().st_mode & 0o777 == 0o700
    assert not list((first.directory / "slots").iterdir())

    moved = tiny.parent / "elsewhere" / tiny.name
    moved.parent.mkdir()
    os.link(tiny, moved)
    second = start(model=moved)
    assert second.complete(ending) == expected, "another ending"
    assert second.metrics()["reused_tokens"] == 591
    again = second.chat()
    assert again["choices"] == said["choices"] and again["usage"]["prompt_tokens"] == said["usage"]["prompt_tokens"]
    found = second.metrics()
    assert found["hits"] == 2 and found["reused_tokens"] == 591 + said["usage"]["prompt_tokens"] - 1
    assert second.complete(tokens) == cold
    assert found["restored_bytes"] > 0 and found["passed_requests"] == found["dropped_blocks"] == 0


def test_answers_are_passed_on_as_they_are(start: Start) -> None:
    proxied = start("--metrics")

    def both(method: str, route: str, body: Any = None) -> tuple[bytes, bytes]:
        (status, own), (direct, expected) = (
            proxied.request(method, route, body, port) for port in (None, proxied.server_port)
        )
        assert status == direct
        return own, expected

    for route in ("/health", "/props", "/v1/models", "/no-such-route"):
        own, expected = both("GET", route)
        assert own == expected, route
    assert proxied.request("GET", "/metrics")[1].startswith(b"# HELP llamacpp:")
    for body in ({"prompt": "a few words"}, {"prompt": prompt(400)}, {"messages": MESSAGES}, {}):
        route = "/v1/chat/completions" if "messages" in body else "/completion"
        own, expected = both("POST", route, {**body, "n_predict": 8, **GREEDY, "stream": True})
        texts = [[event(line) for line in data.splitlines() if line.startswith(b"data: ")] for data in (own, expected)]
        assert texts[0] == texts[1] and (len(texts[0]) > 8 or not body)
    before = proxied.metrics()["passed_requests"]
    tokens = prompt(300)
    for more in ({"n": 2}, {"cache_prompt": False}, {"id_slot": 1}, {"lora": [{"id": 0, "scale": 0.5}]}):
        proxied.request("POST", "/v1/completions", {"prompt": tokens, "max_tokens": 1, **more})
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    proxied.request("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": [picture]}]})
    assert proxied.metrics()["passed_requests"] == before + 5
    with socket.create_connection(("127.0.0.1", proxied.port)) as connection:
        chunks = b"1e\r\n" + b'{"content": "a few words, and ' + b"\r\n6\r\n" + b'more"}' + b"\r\n0\r\n\r\n"
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + chunks + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b'{"tokens":[' in received and received.endswith(b'{"status":"ok"}'), "two requests over one connection"


def event(line: bytes) -> Any:
    """Return the content of an event of a stream, without names and times."""
    with contextlib.suppress(ValueError):
        fields = json.loads(line.removeprefix(b"data: "))
        return fields.get("content"), [choice.get("delta") for choice in fields.get("choices", [])], fields.get("stop")
    return line


def test_several_clients_and_one_that_disconnects(start: Start) -> None:
    proxied = start("--metrics")
    prompts = [prompt(400, seed) for seed in range(4)]
    expected = [proxied.complete(tokens) for tokens in prompts]
    assert len(set(expected)) == 4
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = proxied.complete(prompts[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [answers[number] for number in range(4)] == expected
    assert proxied.metrics()["hits"] >= 2, "two slots cannot hold four prompts"

    disconnect(proxied, {"prompt": prompt(300, seed=9), "n_predict": 1500, "stream": True, **GREEDY})
    assert proxied.complete(prompts[0]) == expected[0]


def disconnect(proxied: Proxied, body: dict[str, Any]) -> None:
    """Disconnect while a stream is sent, and check that the server stops as well: without a stream it goes on by itself."""
    before = predicted(proxied)
    connection = http.client.HTTPConnection("127.0.0.1", proxied.port, timeout=TIMEOUT_S)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data: ")
    wait_busy(proxied, True)
    connection.sock.shutdown(socket.SHUT_RDWR)  # the response has another reference to it
    connection.close()
    wait_busy(proxied, False)
    assert predicted(proxied) < before + body["n_predict"] - 10


def predicted(proxied: Proxied) -> int:
    """Return how many tokens of answers the server has generated."""
    text = proxied.request("GET", "/metrics")[1].decode()
    return int(text.split("\nllamacpp:tokens_predicted_total ")[1].split()[0])


def wait_busy(proxied: Proxied, is_busy: bool) -> None:
    """Wait until a slot of the server is busy, or none is."""
    deadline = time.monotonic() + TIMEOUT_S
    while is_busy != any(slot["is_processing"] for slot in json.loads(proxied.request("GET", "/slots")[1])):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_restored_for_other_settings_or_weights(start: Start, tiny: Path, tmp_path: Path) -> None:
    tokens, other = prompt(300), tmp_path / "other" / tiny.name
    first = start()
    first.complete(tokens)
    first.wait(stored_blocks=1)
    first.end()
    other.parent.mkdir()
    data = bytearray(tiny.read_bytes())
    data[-5] ^= 1
    other.write_bytes(data)
    settings = [["--rope-freq-base", "5000"], ["-ctk", "q8_0"], ["-fa", "off"], ["-c", "8192"], []]
    for count, more in enumerate(settings, 2):
        second = start(*more, model=tiny if more else other)
        second.complete(tokens)
        found = second.wait(stored_blocks=1)
        assert (found["lookups"], found["hits"]) == (1, 0), more
        assert len({path.parent for path in second.states()}) == count
        second.end(signal.SIGKILL)


def test_nothing_is_lost_or_wrong_after_kills(start: Start) -> None:
    tokens, other = prompt(400), prompt(400, seed=1)
    first = start()
    cold, unharmed = first.complete(tokens), first.complete(other)
    assert not first.wait(stored_blocks=2)["dropped_blocks"]
    connection = http.client.HTTPConnection("127.0.0.1", first.port, timeout=TIMEOUT_S)
    body = {"prompt": prompt(300, seed=9), "n_predict": 1500, "stream": True, **GREEDY}
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    connection.getresponse().readline()
    first.wait(stored_blocks=3)  # before its answer ends
    server = first.server()
    left = first.directory / "slots" / f"{next((first.directory / 'slots').glob('*.lock')).stem}-99.slot"
    left.touch()
    first.end(signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{server}").exists():
        assert time.monotonic() < deadline, "the server ends with the proxy"
        time.sleep(0.02)

    second = start()
    assert not left.exists() and len(list((second.directory / "slots").iterdir())) == 1
    assert len(second.states()) == 3
    assert second.complete(tokens) == cold
    assert second.complete(prompt(300, seed=9), 1)
    assert second.metrics()["hits"] == 2
    os.kill(second.server(), signal.SIGKILL)
    assert second.process.wait(TIMEOUT_S) == -signal.SIGKILL, "the proxy ends as its server"

    for path in second.states():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    third = start()
    assert third.complete(tokens) == cold and third.complete(other) == unharmed
    found = third.wait(stored_blocks=2)
    assert found["hits"] == 0, "damaged"
    assert len(third.states()) == 3 and "wrong checksum" in third.log.read_text()


def test_the_limit_holds_and_a_running_server_can_be_attached(start: Start, tmp_path: Path) -> None:
    small = start(options="--limit 700k")
    for seed in range(5):
        small.complete(prompt(300, seed))
        small.wait(stored_blocks=seed + 1)
    stored = small.states()
    assert small.metrics()["evicted_blocks"] > 0 and sum(path.stat().st_size for path in stored) <= 700_000
    newest = max(stored, key=lambda path: path.stat().st_mtime_ns)
    port, log = free_port(), tmp_path / "attached"
    words = ["--url", f"http://127.0.0.1:{small.server_port}", "--slots-dir", str(small.directory / "slots")]
    command = [sys.executable, "-m", "llmcache", "kv", "proxy", str(small.directory), "--floor", "0", *words]
    with open(log, "wb") as stream:
        process = subprocess.Popen([*command, "--listen", str(port)], cwd=ROOT, stdout=stream, stderr=stream)
    attached = Proxied(process, port, log, small.directory)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while " of prompts stored as " not in log.read_text():
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.02)
        attached.complete(prompt(300, seed=4))
        assert attached.metrics()["hits"] == 1 and newest.exists(), "the same prompts"
        assert attached.end(signal.SIGINT) == 130
    finally:
        attached.end(signal.SIGKILL)


def test_slots_that_the_server_clears_are_restored(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """If slots share memory, the server clears idle ones by default; the proxy disables that unless it is set."""
    prompts = [prompt(400, seed) for seed in range(2)]
    for value in ("1", "0"):
        monkeypatch.setenv("LLAMA_ARG_CACHE_IDLE_SLOTS", value)
        proxied = start("-kvu", options="--limit 400M")
        for tokens in prompts * 2:
            timings = proxied.post("/completion", {"prompt": tokens, "n_predict": 2, **GREEDY})["timings"]
            assert timings["prompt_n"] == 1
            if value == "1":
                proxied.wait(stored_blocks=1 + prompts.index(tokens))
        found = proxied.metrics()
        assert found["hits"] == 2, "both were cleared" if value == "1" else "both were stored before"
        proxied.end()


def test_slots_that_share_memory_make_room(start: Start) -> None:
    first = start("-kvu", "--api-key", "secret", context=CONTEXT)
    status, _ = first.request("POST", "/completion", {"prompt": prompt(300)})
    assert (status, first.metrics()["hits"]) == (401, 0)
    first.key = "secret"
    prompts = [prompt(1200, seed) for seed in range(2)]
    expected = [first.complete(tokens) for tokens in prompts]
    first.wait(stored_blocks=2)
    assert [first.complete(tokens) for tokens in prompts] == expected, "one of the two fits"
    assert first.metrics()["hits"] >= 1 and len(first.states()) == 2


@pytest.mark.long
@pytest.mark.gemma
def test_a_sliding_window_is_restored_to_its_end(start: Start) -> None:
    first = start(model=GEMMA, context=4096)
    text = " ".join(f"{number}, {number + 1}" for number in range(100, 180))
    tokens = first.post("/tokenize", {"content": text, "add_special": True})["tokens"]
    assert len(tokens) > 600, "more than a window"
    cold = first.complete(tokens, 8)
    first.wait(stored_blocks=1)
    first.end()
    second = start(model=GEMMA, context=4096)
    assert "partly reused" in second.log.read_text()
    assert second.complete(tokens, 8) == cold
    assert second.metrics()["reused_tokens"] >= len(tokens) - 8, "llama.cpp evaluates the last tokens again"


@pytest.mark.long
@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is not there")
def test_a_conversation_is_restored_with_its_answer(start: Start) -> None:
    first = start(model=SMOLLM2, context=4096)
    asked = [{"role": "user", "content": TEXT[:600]}]
    said = first.chat(messages=asked, max_tokens=70)["choices"][0]["message"]
    first.wait(stored_blocks=2)
    messages = [*asked, said, {"role": "user", "content": "Go on."}]
    expected = first.chat(messages=messages)
    assert len(first.states()) == 1, "the longer one replaces the one that it begins with"
    first.end()
    second = start(model=SMOLLM2, context=4096)
    again = second.chat(messages=messages)
    assert again["choices"] == expected["choices"]
    assert second.metrics()["reused_tokens"] > said_tokens(first, expected)


def said_tokens(proxied: Proxied, answer: Any) -> int:
    """Tokens of a prompt without its last message."""
    return int(answer["usage"]["prompt_tokens"]) - 20
