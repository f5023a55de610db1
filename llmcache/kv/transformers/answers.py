"""A model's answers to questions about long contexts: the context at once, then token by token, with any cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcache.kv.tasks import Chain, Questions


def answer(model: Any, cache: Any, questions: Questions) -> NDArray[np.bool_]:
    """Returns which of `questions` [batch, n] the model answers right; after each it is told the right answer.

    `cache`: an empty one, as `past_key_values`.
    """
    _feed(model, cache, questions.ids)
    found = []
    for asked, right in zip(questions.asked.T, questions.answers.T, strict=True):
        found.append(_feed(model, cache, asked[:, None]) == right)
        _feed(model, cache, right[:, None])
    return np.stack(found, 1)


def follow(model: Any, cache: Any, task: Chain) -> NDArray[np.bool_]:
    """Returns which answers of a chain [batch, steps] are right, when the model's own answers decide what comes next."""
    _feed(model, cache, task.ids)
    found, keys = [], task.first
    for right in task.answers.T:
        answers = _feed(model, cache, keys[:, None])
        _feed(model, cache, answers[:, None])
        keys = task.next_keys(answers)
        found.append(answers == right)
    return np.stack(found, 1)


def _feed(model: Any, cache: Any, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Gives the model the tokens `ids` [batch, tokens]; returns the likeliest next ones [batch]."""
    tokens = torch.from_numpy(np.ascontiguousarray(ids)).to(model.device)
    with torch.no_grad():
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    likeliest: NDArray[np.int64] = logits.argmax(-1).cpu().numpy()
    return likeliest
