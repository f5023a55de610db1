"""A model asked the questions of a probe, and timed: with transformers' own cache or a spilled one, all else the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from llmcache.errors import DataError, UsageError
from llmcache.kv.bench.session import since, snapshot
from llmcache.kv.bench.task_results import DECODING, LOADING, QUERY, UPDATE, Memory, Speed
from llmcache.kv.pipeline import Timeline
from llmcache.kv.pipeline.timeline import EVALUATE, FETCH
from llmcache.kv.pipeline.timeline import UPDATE as UPDATING
from llmcache.kv.tasks import Chain
from llmcache.kv.tasks.probes import Probe
from llmcache.kv.tasks.recall import VOCABULARY
from llmcache.kv.tiers import Traffic
from llmcache.kv.transformers.cache import SpillCache
from llmcache.kv.transformers.enabling import enable
from llmcache.kv.transformers.priming import Prompt, feed

_STAGES = {QUERY: EVALUATE, LOADING: FETCH, UPDATE: UPDATING}


class Subject:
    """An enabled model from a directory, on the gpu if torch sees one, and its tokenizer.

    `tokenizer`: None for the recall model, which has a language of its own. UsageError: there is no such directory.
    DataError: there is no model in it, or no tokenizer.
    """

    def __init__(self, directory: str | Path) -> None:
        if not Path(directory).is_dir():
            raise UsageError(f"--model: {directory} is not a directory", "give one with config.json and weights")
        logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype="auto")
        except (OSError, ValueError) as error:
            hint = "give a directory with config.json and weights"
            raise DataError(f"{directory}: not a model: {error}", hint) from error
        self.model: Any = enable(model.eval().to("cuda" if torch.cuda.is_available() else "cpu"))
        self.tokenizer = None if model.config.vocab_size == VOCABULARY else _tokenizer(directory)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of `text`, without a beginning or an end of text."""
        assert self.tokenizer is not None
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def first(self) -> list[int]:
        """What a text begins with."""
        token = None if self.tokenizer is None else self.tokenizer.bos_token_id
        return [] if token is None else [int(token)]

    def describe(self) -> dict[str, Any]:
        """Returns what the model is, for tables and JSON."""
        text = self.model.config.get_text_config(decoder=True)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        shape = f"{text.num_hidden_layers} layers, {text.num_attention_heads} heads over {heads}"
        return {"family": text.model_type, "shape": shape, "type": str(self.model.dtype).removeprefix("torch.")} | {
            "runs on": str(self.model.device)
        }


def _tokenizer(directory: str | Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        hint = "give a directory with tokenizer.json beside the weights"
        raise DataError(f"{directory}: no tokenizer: {error}", hint) from error


def random_model(shape: Mapping[str, int]) -> Any:
    """Returns an enabled Llama of `shape`, arguments of its config, with random weights: for times alone."""
    torch.manual_seed(0)
    return enable(LlamaForCausalLM(LlamaConfig(**shape)).eval())


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Torch with `count` threads; None: as many as it has."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prompt(subject: Subject, ids: NDArray[np.int64]) -> Prompt:
    """Returns what the model makes of the prompts `ids` [batch, tokens], to be given to several caches."""
    return Prompt(subject.model, ids)


def answered(subject: Subject, cache: Any, probe: Probe) -> NDArray[np.bool_]:
    """Returns which questions [batch, n] of `probe` the model answers right, with a cache that has read the contexts.

    Right is what greedy decoding gives word for word: every token of the answer is the likeliest after those before it.
    The true answer is what it goes on with.
    """
    found = []
    for question, answer in zip(probe.asked, probe.answers, strict=True):
        right = np.ones(len(answer), bool)
        said = np.zeros(len(answer), np.int64)
        for token in question.T:
            said = feed(subject.model, cache, token[:, None])
        for token in answer.T:
            right &= said == token
            said = feed(subject.model, cache, token[:, None])
        found.append(right)
    return np.stack(found, 1)


def followed(subject: Subject, cache: Any, task: Chain) -> NDArray[np.bool_]:
    """Returns which answers of a chain [batch, steps] are right, when the model's own answers decide what comes next."""
    found, keys = [], task.first
    for right in task.answers.T:
        said = feed(subject.model, cache, keys[:, None])
        feed(subject.model, cache, said[:, None])
        keys = task.next_keys(said)
        found.append(said == right)
    return np.stack(found, 1)


class Run:
    """One sequence generated with one cache, step by step, so that several can take turns; `timeline`: the cache's."""

    def __init__(self, subject: Subject, cache: Any, timeline: Timeline | None = None) -> None:
        self._model, self.cache, self._timeline = subject.model, cache, timeline
        self._begin_ns = self._prefill_ns = self._second_ns = 0
        self._steps_ns: list[int] = []
        self._before = Traffic()

    def read(self, ids: NDArray[np.int64]) -> None:
        """Reads a prompt [1, tokens] and makes the second token; what comes now is measured from the next step on."""
        begin_ns = time.perf_counter_ns()
        self._next = feed(self._model, self.cache, ids)
        self._prefill_ns = time.perf_counter_ns() - begin_ns
        self.step()
        self._second_ns = time.perf_counter_ns() - begin_ns

    def take(self, given: Prompt, token: int = 0) -> None:
        """Takes what a prompt left, and goes on with `token`: for times of steps alone, the prompt's is not measured."""
        given.give(self.cache)
        self._next = np.array([token])

    def begin(self) -> None:
        """Forgets the steps so far: they were to warm up."""
        self._steps_ns.clear()
        if self._timeline is not None:
            self._timeline.clear()
            self._before = snapshot(self.cache.traffic)

    def step(self) -> None:
        """Makes one more token."""
        begin_ns = time.perf_counter_ns()
        self._next = feed(self._model, self.cache, self._next[:, None])
        self._steps_ns.append(time.perf_counter_ns() - begin_ns)

    def speed(self) -> Speed:
        """Returns how long it took; parts are those of the step in the middle, so that they add up."""
        middle = statistics.median_low(self._steps_ns)
        parts = dict.fromkeys((LOADING, QUERY, UPDATE), 0.0)
        if self._timeline is not None:
            timeline, at = self._timeline, self._steps_ns.index(middle)
            step = self.cache.store.step - len(self._steps_ns) + at
            parts = {part: float(timeline.busy_ns(step, stage=stage)) for part, stage in _STAGES.items()}
        rest = middle - sum(parts.values())
        return Speed(len(self._steps_ns), self._prefill_ns, self._second_ns, middle, {**parts, DECODING: rest})

    def moved(self) -> Traffic:
        """Returns what moved since `begin`; nothing where all is in memory."""
        return Traffic() if self._timeline is None else since(self._before, self.cache.traffic)

    @property
    def spilled_bytes(self) -> int:
        """Written to the spill file since the beginning."""
        return 0 if self._timeline is None else int(self.cache.traffic.bytes_between("cpu", "ssd"))

    @property
    def steps(self) -> int:
        """Steps since `begin`."""
        return len(self._steps_ns)

    def memory(self) -> Memory:
        """Returns what the cache keeps in memory; not what is read of the spill file, which the kernel may keep as well."""
        if not isinstance(self.cache, SpillCache):
            sides = (side for layer in self.cache.layers for side in (layer.keys, layer.values))
            return Memory(sum(side.numel() * side.element_size() for side in sides), 0)
        policy = getattr(self.cache.conversation.engine, "policy", None)
        return Memory(self.cache.store.memory_bytes, getattr(getattr(policy, "indexes", None), "size_bytes", 0))
