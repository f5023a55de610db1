"""AttachedCache: a PrefixCache as one Llama has it, from `llama.set_cache` on.

`Llama` uses its cache twice in each completion: `cache[prompt]` before it evaluates the prompt, and `cache[tokens] = state`
after the answer. It does not pass itself. So kv.llama.cache replaces `Llama.set_cache`: each Llama gets a cache of its own,
which replaces three methods of this Llama:

- `_create_completion` marks when code of a completion runs, and reads how the answer was requested.
- `eval` stores a prompt as soon as it is evaluated, before the first token is sampled. It evaluates the last token of the
  prompt alone. A restored prompt continues in the same way, so that both have the same answer, to the last bit.
- `save_state`, called by a completion, copies no scores, and nothing if all blocks are stored. Called by others it is
  unchanged.
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
"""A prompt is stored before its answer if at least so many tokens were evaluated, which takes longer than the copy."""
GROWTH_TOKENS = 64
"""While an answer is generated, memory is looked at after so many tokens."""
_REPLACED = ("_create_completion", "eval", "save_state")
_SCORE_BYTES = 4


class AttachedCache(BaseLlamaCache):
    """The PrefixCache `cache` for `llama` alone; all other attributes are those of `cache`."""

    def __init__(self, cache: PrefixCache, llama: Llama) -> None:
        super().__init__(cache.capacity_bytes)
        self._cache, self._llama = cache, weakref.ref(llama)
        self._completing = self._echoes = False
        self._answer_tokens = 0
        self._prompt: Sequence[int] | None = None  # looked up, and not evaluated yet
        self._stored: Task | None = None  # the prompt, while its answer is generated
        self._scored = 0  # tokens whose scores have memory
        for name in _REPLACED:
            setattr(llama, name, getattr(self, name))

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the PrefixCache."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._cache, name)

    def detach(self, llama: Llama) -> None:
        """Give `llama` its own methods back."""
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

        The returned state is no longer than what the Llama then has, so the Llama does not load it.
        """
        llama = self._owner()
        self._prompt, self._stored = key, None
        self._make_room(llama, len(key))
        if llama._logits_all and self._echoes:
            llama.reset()  # its scores of an earlier prompt may be older than what was restored of it
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
        """True if a prefix of the tokens `key` is stored."""
        return isinstance(key, Sequence) and self._cache.has_prefix(self._owner(), key)

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Write the blocks of `value` that are not stored yet; its tokens are taken from it, not from `key`."""
        self._cache.keep(self._owner(), value)

    # Methods of the Llama

    def _create_completion(self, *args: Any, **named: Any) -> Iterator[Any]:
        llama = self._owner()
        self._echoes = bool(named.get("echo")) and named.get("logprobs") is not None
        self._answer_tokens = max(0, named.get("max_tokens") or 0)
        completion = type(llama)._create_completion(llama, *args, **named)
        del llama  # it may be deleted while the client reads the answer
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
        """Evaluate tokens; those of a prompt that was looked up are then stored."""
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
        """Return the state of the Llama; for a completion that stores it, without scores, and empty if all is stored."""
        llama = self._owner()
        if not self._completing:
            return type(llama).save_state(llama)
        stored, self._stored = self._stored, None
        return self._cache.handed(llama, stored)

    def _make_room(self, llama: Llama, tokens: int) -> None:
        """Drop prompts that wait to be written if the scores of so many tokens, and some more, need their memory.

        `Llama` has a row of scores for each token with logits_all, and llama.cpp one for each token of a batch; both take
        memory when they are used first.
        """
        if llama._logits_all:
            tokens = min(tokens + GROWTH_TOKENS, llama.n_ctx())
            rows = [min(count, llama.n_ctx()) + min(count, llama.n_batch) for count in (self._scored, tokens)]
            self._cache.make_room(max(0, rows[1] - rows[0]) * llama.scores.shape[1] * _SCORE_BYTES)
