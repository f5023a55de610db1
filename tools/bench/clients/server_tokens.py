"""Client: the stock llama.cpp server with its default flags, in this process, over a mapped model; turns of one chat.

The wheel `xllamacpp` embeds the server; the client sets the path of the model and silences the log. For each turn it sends
the chat and `--prompt` new random tokens over HTTP, and reads an answer of `--answer` tokens. A step is one token of an
answer; the first step of a turn includes the evaluation of the prompt. The server samples with its default settings and a
fixed seed. With greedy sampling, a model with random weights would soon repeat one token, and an MoE model would use the
same experts again. `crc` covers all tokens up to this step with their log-probabilities; it differs between plain storage
and a mount only if a byte was wrong.

With `--pause` each token is a separate request, because the server decodes ahead of a client that waits.
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
from typing import Any, NamedTuple
from urllib.parse import urlsplit

# Python searches the directory of a script for modules, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.bench.clients import StepFields, steps

SITE = Path(sys.prefix) / "server"
"""Where `setup_server` of tools/_setup.sh installs the wheel."""
FIRST_WORD, LAST_WORD = 300, 1300  # ordinary words in every vocabulary of tools/make_model.py
# The server sends nothing for a token that ends within a UTF-8 character, so the bytes 0x80 to 0xFF are excluded.
NO_PARTIAL_CHARACTERS = [[token, False] for token in range(3 + 0x80, 3 + 0x100)]
SETTINGS = {"seed": 0, "ignore_eos": True, "stream": True, "n_probs": 1, "logit_bias": NO_PARTIAL_CHARACTERS}


class AnsweredToken(NamedTuple):
    """A token that the server chose, and the logarithm of its probability."""

    token: int
    log_probability: float


def serve(model: str) -> Any:
    """Return a server of `model`, which serves at its `listening_address` for as long as it is referenced."""
    sys.path.append(str(SITE))
    import xllamacpp  # slow: not for --help

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.verbosity = 0  # no log: the standard output is for events
    return xllamacpp.Server(parameters)


def answer(address: str, prompt: list[int], count: int) -> Iterator[AnsweredToken]:
    """Yield the tokens of one answer as the server sends them."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc)
    body = json.dumps({"prompt": prompt, "n_predict": count, **SETTINGS})
    connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.HTTPStatus.OK:
        raise OSError(f"the server replied {response.status}: {response.read().decode()}")
    for line in response:
        event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {}
        for token in event.get("completion_probabilities", []):
            yield AnsweredToken(token["id"], token["logprob"])
    connection.close()


def chat(address: str, turns: int, prompt_tokens: int, answer_tokens: int, at_once: int) -> Iterator[AnsweredToken]:
    """Yield the tokens of all answers, `at_once` of them per request; each prompt contains the whole chat before it."""
    words, said = random.Random(0), [1]
    for _ in range(turns):
        said += [words.randrange(FIRST_WORD, LAST_WORD) for _ in range(prompt_tokens)]
        for start in range(0, answer_tokens, at_once):
            for answered in answer(address, said.copy(), min(at_once, answer_tokens - start)):
                said.append(answered.token)
                yield answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=60, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=80, help="tokens of each answer")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between tokens")
    args = parser.parse_args()

    begin = time.perf_counter()
    server = serve(args.model)
    at_once = 1 if args.pause else args.answer
    tokens = chat(server.listening_address, args.turns, args.prompt, args.answer, at_once)
    crc = 0

    def token(_index: int) -> Callable[[], StepFields]:
        nonlocal crc
        crc = zlib.crc32(repr(tuple(next(tokens))).encode(), crc)
        return lambda: {"crc": crc}

    steps(begin, args.turns * args.answer, token, pause=args.pause)


if __name__ == "__main__":
    main()
