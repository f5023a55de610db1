"""Measure a model: answers, time and selected tokens, with any cache and otherwise equal conditions.

Source: hillinfer.txt, section 4.3, figure 8. Differs from the paper: small models, generated tasks and texts of this
machine (`llmcache.kv.tasks`) instead of OpenBookQA, RTE, PIQA and COPA.
"""

from __future__ import annotations

import copy
import importlib.util
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache
from transformers.utils import logging

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.errors import DataError, MissingRequirement, UsageError
from llmcache.kv.bench.results import DECODING, LOADING, QUERY, UPDATE, KvMemory, Speed
from llmcache.kv.bench.synthetic import since
from llmcache.kv.pipeline import Timeline
from llmcache.kv.pipeline.timeline import EVALUATE, FETCH
from llmcache.kv.pipeline.timeline import UPDATE as UPDATING
from llmcache.kv.policies.base import KvPolicy
from llmcache.kv.policies.baselines import all_products, softmax
from llmcache.kv.tasks.english import Document
from llmcache.kv.tasks.recall import VOCABULARY, Chain, Probe, Questions, probe_of
from llmcache.kv.tiers import Selection, Traffic
from llmcache.kv.transformers import cache_argument
from llmcache.kv.transformers.attention import enable
from llmcache.kv.transformers.cache import SpillCache, SpillLayer, spilled_layers
from llmcache.kv.transformers.conversation import Conversation, no_attention
from llmcache.kv.transformers.tensors import Call, Output

_STAGES = {QUERY: EVALUATE, LOADING: FETCH, UPDATE: UPDATING}


def load_model(path: str | Path) -> Any:
    """Return an enabled model from a directory, or from a GGUF file as float32.

    DataError: there is no model. MissingRequirement: the packages that read GGUF files are missing.
    """
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(**_place(path), dtype=torch.float32 if _is_gguf(path) else "auto")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a model: {error}", "name a GGUF file, or a directory with config.json") from error
    return enable(model.eval())


def _is_gguf(path: str | Path) -> bool:
    return Path(path).suffix == ".gguf"


def _place(path: str | Path) -> dict[str, Any]:
    if not _is_gguf(path):
        return {"pretrained_model_name_or_path": path, "local_files_only": True}
    if missing := [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]:
        raise MissingRequirement(f"{path}: not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    parent, name = Path(path).parent, Path(path).name
    return {"pretrained_model_name_or_path": parent, "gguf_file": name, "local_files_only": True}


class Subject:
    """An enabled model, on the GPU if torch has one, and its tokenizer, which the recall model does not have.

    UsageError: the path does not exist; DataError: there is no tokenizer; other errors as for `load_model`.
    """

    def __init__(self, path: str | Path) -> None:
        if not (Path(path).is_file() if _is_gguf(path) else Path(path).is_dir()):
            hint = "name a GGUF file, or a directory with config.json and weights"
            raise UsageError(f"--model: {path} is neither a directory nor a GGUF file", hint)
        self.model: Any = load_model(path).to("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer: Any = None
        if self.model.config.vocab_size != VOCABULARY:
            try:
                self.tokenizer = AutoTokenizer.from_pretrained(**_place(path))
            except (OSError, ValueError) as error:
                hint = "name a directory that also has tokenizer.json"
                raise DataError(f"{path}: no tokenizer: {error}", hint) from error

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def first(self) -> list[int]:
        token = None if self.tokenizer is None else self.tokenizer.bos_token_id
        return [] if token is None else [int(token)]

    def describe(self) -> dict[str, Any]:
        text = self.model.config.get_text_config(decoder=True)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        shape = f"{text.num_hidden_layers} layers, {text.num_attention_heads} heads, {heads} KV heads"
        kind, device = str(self.model.dtype).removeprefix("torch."), str(self.model.device)
        return {"family": text.model_type, "shape": shape, "type": kind, "runs on": device}


def random_model(shape: Mapping[str, int]) -> Any:
    """Return an enabled Llama with the config `shape` and random weights, to measure times."""
    torch.manual_seed(0)
    return enable(LlamaForCausalLM(LlamaConfig(**shape)).eval())


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Run torch with `count` threads; None: with its default."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stock(model: Any) -> Any:
    """Return the empty cache that transformers would use for `model`."""
    return DynamicCache(config=model.config)


def feed(model: Any, cache: Any, ids: Int64s) -> Int64s:
    """Pass the tokens `ids` [batch, tokens] to the model; return the likeliest next ones [batch]."""
    likeliest: Int64s = logits(model, cache, ids).argmax(-1).cpu().numpy()
    return likeliest


def logits(model: Any, cache: Any, ids: Int64s) -> torch.Tensor:
    """Pass the tokens `ids` [batch, tokens] to the model; return the logits [batch, vocabulary] of the next ones."""
    tokens = torch.from_numpy(np.ascontiguousarray(ids)).to(model.device)
    with torch.no_grad():
        output = model(input_ids=tokens, **cache_argument(cache), use_cache=True, logits_to_keep=1)
    found: torch.Tensor = output.logits[:, -1]
    return found


def follow(model: Any, cache: Any, text: Document) -> Floats:
    """Return log p [n - 1, vocabulary], in nats, of the n tokens after `text` but the first; the cache has read `text`."""
    found = [logits(model, cache, text.following[:, at : at + 1]) for at in range(text.following.shape[1] - 1)]
    log_p: Floats = torch.cat(found).float().log_softmax(-1).cpu().numpy()
    return log_p


def said(model: Any, cache: Any, asked: Probe | Chain | Document) -> Any:
    """Return the result of `follow` for a document, otherwise that of `ask`."""
    return follow(model, cache, asked) if isinstance(asked, Document) else ask(model, cache, asked)


def answer(model: Any, cache: Any, task: Questions | Chain) -> Flags:
    """Return which answers [batch, n] of `task` are right, with an empty cache that first reads the contexts."""
    feed(model, cache, task.ids)
    return ask(model, cache, probe_of(task) if isinstance(task, Questions) else task)


def ask(model: Any, cache: Any, task: Probe | Chain) -> Flags:
    """Return which answers [batch, n] are right, with a cache that has read the contexts.

    An answer is right if greedy decoding gives every token. A probe continues with the true answer; in a chain the model's
    own answers determine the next question.
    """
    found = []
    if isinstance(task, Chain):
        keys = task.first
        for expected in task.answers.T:
            likeliest = feed(model, cache, keys[:, None])
            feed(model, cache, likeliest[:, None])
            keys = task.next_keys(likeliest)
            found.append(likeliest == expected)
        return np.stack(found, 1)
    for question, expected in zip(task.asked, task.answers, strict=True):
        right = np.ones(len(expected), bool)
        likeliest = np.zeros(len(expected), np.int64)
        for token in question.T:
            likeliest = feed(model, cache, token[:, None])
        for token in expected.T:
            right &= likeliest == token
            likeliest = feed(model, cache, token[:, None])
        found.append(right)
    return np.stack(found, 1)


def accuracy(model: Any, questions: Questions | Chain, policy: str | None = None, **settings: Any) -> float:
    """Return the share (0..1) of `questions` that `model` answers right, with all contexts in one batch.

    `policy` None: transformers' own cache; otherwise a SpillCache with `settings`, which selects tokens from the first on.
    """
    # Products of such a small model take longer to distribute over threads than to compute.
    with torch_threads(1):
        if policy is None:
            return float(answer(model, stock(model), questions).mean())
        with SpillCache(model.config, policy, **{"full_tokens": 0, **settings}) as cache:
            return float(answer(model, cache, questions).mean())


class _Recorder(Conversation):
    def __init__(self) -> None:
        self.calls: list[Call] = []

    length = 0
    engine_ahead = None

    def expect(self, layer: int) -> None:
        return

    def attend(self, layer: int, call: Call) -> Output:
        self.calls.append(call)
        return call.run(call.key, call.value, call.mask)


class Prompt:
    """Keys, values and queries of a batch of prompts `ids`, computed once to fill several caches.

    This is valid because prompts get exact attention with every policy. Use it for accuracy and the time of later steps.
    """

    def __init__(self, model: Any, ids: Int64s) -> None:
        recorder = _Recorder()
        self._layers = spilled_layers(model.config, lambda count, alone: recorder)
        feed(model, Cache(layers=self._layers), ids)
        self._calls = recorder.calls

    @classmethod
    def by_chance(cls, model: Any, tokens: int) -> Prompt:
        """Return *synthetic*, normally distributed keys and values, and zero queries, to measure times.

        All layers of `model` must use full attention.
        """
        made = cls.__new__(cls)
        text = model.config.get_text_config(decoder=True)
        heads, kv_heads, dim = text.num_attention_heads, text.num_key_value_heads, text.head_dim
        random = torch.Generator().manual_seed(0)
        none = torch.zeros((1, 1, 1, 1), dtype=model.dtype, device=model.device).expand(1, heads, tokens, dim)
        made._calls = []
        made._layers = spilled_layers(model.config, lambda count, alone: _Recorder())
        for _ in range(text.num_hidden_layers):
            drawn = (torch.randn((1, kv_heads, tokens, dim), generator=random) for _ in range(2))
            keys, values = (side.to(model.device, model.dtype) for side in drawn)
            made._calls.append(Call(None, none, keys, values, None, {"scaling": dim**-0.5}, no_attention))
        return made

    def give(self, cache: Any) -> None:
        calls = iter(self._calls)
        for index, layer in enumerate(self._layers):
            if not isinstance(layer, SpillLayer):
                cache.layers[index] = copy.deepcopy(layer)
            elif isinstance(cache, SpillCache):
                cache.conversation.attend(layer.number, replace(next(calls), stock=no_attention))
            else:
                call = next(calls)
                cache.update(call.key, call.value, index)


class Run:
    """One sequence that is generated with one cache, step by step, so that several can alternate."""

    def __init__(self, model: Any, cache: Any, timeline: Timeline | None = None) -> None:
        self._model, self.cache, self._timeline = model, cache, timeline
        self._prefill_ns = self._second_ns = 0
        self._steps_ns: list[int] = []
        self._before = Traffic()

    def read(self, ids: Int64s) -> None:
        begin_ns = time.perf_counter_ns()
        self._next = feed(self._model, self.cache, ids)
        self._prefill_ns = time.perf_counter_ns() - begin_ns
        self.step()
        self._second_ns = time.perf_counter_ns() - begin_ns

    def take(self, given: Prompt) -> None:
        given.give(self.cache)
        self._next = np.array([0])

    def begin(self) -> None:
        self._steps_ns.clear()
        if self._timeline is not None:
            self._timeline.clear()
            self._before = since(Traffic(), self.cache.traffic)

    def step(self) -> None:
        begin_ns = time.perf_counter_ns()
        self._next = feed(self._model, self.cache, self._next[:, None])
        self._steps_ns.append(time.perf_counter_ns() - begin_ns)

    def speed(self) -> Speed:
        """Return the times; parts are those of the median step, so that they add up."""
        middle = statistics.median_low(self._steps_ns)
        parts = dict.fromkeys((LOADING, QUERY, UPDATE), 0.0)
        if self._timeline is not None:
            timeline, at = self._timeline, self._steps_ns.index(middle)
            step = self.cache.store.step - len(self._steps_ns) + at
            parts = {part: float(timeline.busy_ns(step, stage=stage)) for part, stage in _STAGES.items()}
        rest = middle - sum(parts.values())
        return Speed(len(self._steps_ns), self._prefill_ns, self._second_ns, middle, {**parts, DECODING: rest})

    def moved(self) -> Traffic:
        return Traffic() if self._timeline is None else since(self._before, self.cache.traffic)

    @property
    def spilled_bytes(self) -> int:
        return 0 if self._timeline is None else int(self.cache.traffic.bytes_between("cpu", "ssd"))

    @property
    def steps(self) -> int:
        return len(self._steps_ns)

    def memory(self) -> KvMemory:
        if not isinstance(self.cache, SpillCache):
            sides = (side for layer in self.cache.layers for side in (layer.keys, layer.values))
            return KvMemory(sum(side.numel() * side.element_size() for side in sides), 0)
        engine = self.cache.conversation.engine
        return KvMemory(self.cache.conversation.memory_bytes, 0 if engine is None else engine.policy.index_bytes)


class Watch:
    """Wraps a policy, and computes exact attention for comparison with each selection (slow: everything is read).

    `recalls` and `masses` (see `Attention`) have one mean over the batch and the heads for each step and layer with a
    selection. The newest token is not counted.
    """

    def __init__(self, policy: KvPolicy) -> None:
        self._policy = policy
        self.recalls: list[float] = []
        self.masses: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def prefilled(self, layer: int, queries: Floats, start: int) -> None:
        self._policy.prefilled(layer, queries, start)

    def select(self, layer: int, queries: Floats) -> Selection:
        selection, inside = self._policy.select(layer, queries), self._policy.inside
        if selection.count < inside.stop - inside.start:
            weights = softmax(all_products(self._policy.store, layer, queries, self._policy.scale))
            chosen = np.zeros(weights.shape[:2] + weights.shape[3:], bool)
            np.put_along_axis(chosen, selection.positions, True, 2)
            if selection.count:
                self.recalls.append(_recalled(weights[..., inside], chosen[..., inside]))
            chosen[..., : inside.start] = chosen[..., inside.stop :] = True
            self.masses.append(float((weights * chosen[:, :, None]).sum(-1).mean()))
        return selection


def _recalled(weights: Floats, chosen: Flags) -> float:
    best_first = np.argsort(-weights.sum(2), axis=-1)
    are_best = np.arange(chosen.shape[2]) < chosen.sum(2, keepdims=True)
    return float(np.take_along_axis(chosen, best_first, 2)[are_best].mean())


def watch(cache: SpillCache) -> Watch:
    """Replace the policy of `cache`, which has read a prompt, with a `Watch`, and return it."""
    engine: Any = cache.conversation.engine
    engine.policy = found = Watch(engine.policy)
    return found
