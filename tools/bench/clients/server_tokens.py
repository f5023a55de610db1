"""Client: the stock llama.cpp server with its default flags, in this process, over a mapped model; two turns of one chat.

The wheel `xllamacpp` embeds the server; the client sets the path of the model and silences the log. For each turn it sends
the chat and `--prompt` new random tokens over HTTP, and reads an answer of `--answer` tokens. A step is one token of an
answer; the first step of a turn includes the evaluation of the prompt. `crc` covers all tokens up to this step. The server
chooses them greedily, so they are the same over plain storage and over a mount.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

# For a script, Python searches its directory for modules and not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.bench.clients import Told, steps

FIRST_WORD, LAST_WORD = 300, 1300  # ordinary words in every vocabulary of tools/make_model.py
SETTINGS = {"temperature": 0, "ignore_eos": True, "stream": True, "return_tokens": True}


def answer(address: str, prompt: list[int], count: int) -> Iterator[int]:
    """Yield the tokens of one answer as the server sends them."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc)
    body = json.dumps({"prompt": prompt, "n_predict": count, **SETTINGS})
    connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.HTTPStatus.OK:
        raise OSError(f"the server replied {response.status}: {response.read().decode()}")
    for line in response:
        event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {}
        yield from event.get("tokens", [])
    connection.close()


def chat(address: str, turns: int, prompt_tokens: int, answer_tokens: int) -> Iterator[int]:
    """Yield the tokens of all answers; each prompt contains the whole chat before it."""
    words, said = random.Random(0), [1]
    for _ in range(turns):
        said += [words.randrange(FIRST_WORD, LAST_WORD) for _ in range(prompt_tokens)]
        for token in answer(address, said.copy(), answer_tokens):
            said.append(token)
            yield token


def main() -> None:
    """Start the server, then time the tokens of each turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=60, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=80, help="tokens of each answer")
    parser.add_argument("--site", type=Path, metavar="DIR", help="directory in which xllamacpp is installed")
    args = parser.parse_args()
    if args.site is not None:
        sys.path.append(str(args.site))
    import xllamacpp  # slow: not for --help

    begin = time.perf_counter()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = args.model
    parameters.verbosity = 0  # no log: the standard output is for events
    server = xllamacpp.Server(parameters)
    tokens = chat(server.listening_address, args.turns, args.prompt, args.answer)
    crc = 0

    def token(_index: int) -> Callable[[], Told]:
        nonlocal crc
        crc = zlib.crc32(next(tokens).to_bytes(4, "little"), crc)
        return lambda: {"crc": crc}

    steps(begin, args.turns * args.answer, token)


if __name__ == "__main__":
    main()
