"""AttachedCache: the cache of one Llama, which uses a PrefixCache that several may share.

`Llama` uses its cache twice in each completion: `cache[prompt]` before it evaluates the prompt, and `cache[tokens] = state`
after the answer. It does not pass itself to the cache. Therefore kv.llama.cache replaces `Llama.set_cache` to give each
Llama an AttachedCache, which replaces three methods of this Llama:

- `_create_completion` records whether a completion is running, and reads the options of the request.
- `eval` stores a prompt after it is evaluated and before the first token is sampled. It evaluates the last token of the
  prompt separately. A restored prompt continues in the same way, so the answers are bit-identical.
- `save_state`, called by a completion, does not copy scores, and copies nothing if all blocks are stored. Other callers get
  the unchanged method.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llama_cpp import BaseLlamaCache, Llama
from llama_cpp.llama import LlamaState

from llmcache.errors import LlmcacheError

if TYPE_CHECKING:
    from llmcache.kv.llama.cache import PrefixCache, Task

log = logging.getLogger("llmcache.kv")

EARLY_TOKENS = 64
"""Least number of evaluated tokens for which a prompt is stored before its answer; for fewer, the copy takes longer."""
GROWTH_TOKENS = 64
"""Interval in tokens at which available memory is checked while an answer is generated."""
_REPLACED = ("_create_completion", "eval", "save_state")
_SCORE_BYTES = 4


class AttachedCache(BaseLlamaCache):
    """The cache of `llama`, which stores prompts in the PrefixCache `cache` and has its public attributes."""

    def __init__(self, cache: PrefixCache, llama: Llama) -> None:
        super().__init__(cache.capacity_bytes)
        self._cache, self._llama = cache, weakref.ref(llama)
        self._completing = self._echoes = False
        self._answer_tokens = 0
        self._prompt: Sequence[int] | None = None  # a prompt that was looked up and is not evaluated yet
        self._stored: Task | None = None  # the task that stores the prompt, while its answer is generated
        self._scored = 0  # tokens whose scores have memory already
        for name in _REPLACED:
            setattr(llama, name, getattr(self, name))

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the PrefixCache."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._cache, name)

    def detach(self, llama: Llama) -> None:
        """Restore the original methods of `llama`."""
        for name in _REPLACED:
            vars(llama).pop(name, None)

    def _owner(self) -> Llama:
        llama = self._llama()
        if llama is None:
            raise ReferenceError("the Llama of this cache was deleted")
        return llama

    # The interface of BaseLlamaCache

    @property
    def cache_size(self) -> int:
        """Bytes of all blocks in the directory."""
        return self._cache.cache_size

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """Restore the longest stored prefix of `key`, and return its tokens; KeyError if there is none.

        The returned state has only the tokens that the Llama then holds, so the Llama does not load it.
        """
        llama = self._owner()
        self._prompt, self._stored = key, None
        self._make_room(llama, len(key))
        if llama._logits_all and self._echoes:
            llama.reset()  # it may have tokens that were restored without their scores
            raise KeyError("the request needs the scores of the prompt's tokens, which are not stored")
        self._prompt = None  # restoring may evaluate
        try:
            restored = self._cache.restore(llama, key)
        except (LlmcacheError, OSError, MemoryError) as error:
            log.warning("nothing was restored: %s", error)
            restored = 0
        self._prompt = key
        if not restored:
            raise KeyError("no stored prefix is longer than the one in the context")
        return LlamaState(llama.input_ids[: llama.n_tokens].copy(), llama.scores[:0], llama.n_tokens, b"", 0, 0)

    def __contains__(self, key: object) -> bool:
        """Return whether a prefix of the tokens `key` is stored."""
        return isinstance(key, Sequence) and self._cache.has_prefix(self._owner(), key)

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Store the blocks of `value` that are not stored yet; the tokens are those of `value`, not `key`."""
        self._cache.keep(self._owner(), value)

    # Replaced methods of the Llama

    def _create_completion(self, *args: Any, **named: Any) -> Iterator[Any]:
        llama = self._owner()
        self._echoes = bool(named.get("echo")) and named.get("logprobs") is not None
        self._answer_tokens = max(0, named.get("max_tokens") or 0)
        completion = type(llama)._create_completion(llama, *args, **named)
        del llama  # so that it can be deleted while the client reads the answer
        try:
            while True:
                self._completing = True
                try:
                    part = next(completion)
                except StopIteration:
                    return
                finally:
                    self._completing = False
                yield part
        finally:
            completion.close()
            self._echoes, self._stored = False, None

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens, and store the prompt if they are the rest of one that was looked up."""
        llama, (prompt, self._prompt) = self._owner(), (self._prompt, None)
        evaluate: Callable[[Llama, Sequence[int]], None] = type(llama).eval
        is_prompt = prompt is not None and self._completing and self._cache.cuts(llama, len(prompt))
        if is_prompt and len(tokens) > 1:
            evaluate(llama, tokens[:-1])
        evaluate(llama, tokens[-1:] if is_prompt else tokens)
        if llama.n_tokens > self._scored + GROWTH_TOKENS - 1:
            self._scored = llama.n_tokens
            self._make_room(llama, llama.n_tokens)
        if is_prompt and len(tokens) >= EARLY_TOKENS:
            self._stored = self._cache.keep_prompt(llama, self._answer_tokens or llama.n_ctx())

    def save_state(self) -> LlamaState:
        """Return the state of the Llama; during a completion without scores, and empty if all blocks are stored."""
        llama = self._owner()
        if not self._completing:
            return type(llama).save_state(llama)
        stored, self._stored = self._stored, None
        return self._cache.handed(llama, stored)

    def _make_room(self, llama: Llama, tokens: int) -> None:
        """Drop queued prompts if the scores of `tokens`, and of GROWTH_TOKENS more, need their memory.

        With logits_all, `Llama` has a row of scores for each token, and llama.cpp one for each token of a batch; both use
        memory only from the first access on.
        """
        if llama._logits_all:
            tokens = min(tokens + GROWTH_TOKENS, llama.n_ctx())
            rows = [min(count, llama.n_ctx()) + min(count, llama.n_batch) for count in (self._scored, tokens)]
            self._cache.make_room(max(0, rows[1] - rows[0]) * llama.scores.shape[1] * _SCORE_BYTES)
