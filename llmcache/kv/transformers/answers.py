"""A model's answers to questions about long contexts: the context at once, then token by token, with any cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.tasks import Chain, Questions
from llmcache.kv.transformers.priming import feed


def answer(model: Any, cache: Any, questions: Questions) -> NDArray[np.bool_]:
    """Returns which of `questions` [batch, n] the model answers right; after each it is told the right answer.

    `cache`: an empty one, as `past_key_values`.
    """
    feed(model, cache, questions.ids)
    found = []
    for asked, right in zip(questions.asked.T, questions.answers.T, strict=True):
        found.append(feed(model, cache, asked[:, None]) == right)
        feed(model, cache, right[:, None])
    return np.stack(found, 1)


def follow(model: Any, cache: Any, task: Chain) -> NDArray[np.bool_]:
    """Returns which answers of a chain [batch, steps] are right, when the model's own answers decide what comes next."""
    feed(model, cache, task.ids)
    found, keys = [], task.first
    for right in task.answers.T:
        answers = feed(model, cache, keys[:, None])
        feed(model, cache, answers[:, None])
        keys = task.next_keys(answers)
        found.append(answers == right)
    return np.stack(found, 1)
