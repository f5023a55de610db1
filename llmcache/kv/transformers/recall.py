"""How many answers a model of the recall task gets right with a spilled cache: what a policy forgets, it answers wrongly.

Source: hillinfer.txt, section 4.3, figure 8 asks the same of its models on OpenBookQA, RTE, PIQA and COPA. Differs from
the paper: one small model and a generated task (`llmcache.kv.tasks`), since neither models nor data are downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from llmcache.errors import DataError
from llmcache.kv.tasks import Questions
from llmcache.kv.transformers.cache import SpillCache
from llmcache.kv.transformers.enabling import enable


def load_model(directory: str | Path) -> Any:
    """Returns the model in `directory`, ready for a SpillCache; DataError if there is none."""
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{directory}: not a model: {error}", "give a directory with config.json and weights") from error
    return enable(model.eval())


def accuracy(model: Any, questions: Questions, policy: str | None = None, **settings: Any) -> float:
    """Returns the share (0 .. 1) of `questions` that `model` answers right, one after the other, all contexts at once.

    Each question and its true answer join the context, so that one wrong answer does not spoil the next. `policy` None:
    transformers' own cache, which keeps everything; else a SpillCache with `settings`, whose errors it has.
    """
    with _one_thread():
        if policy is None:
            return _share(model, questions, DynamicCache())
        with SpillCache(model.config, policy, **settings) as cache:
            return _share(model, questions, cache)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch with one thread: products of so small a model take longer to share out than to do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _share(model: Any, questions: Questions, cache: Any) -> float:
    right = np.empty(questions.answers.shape, bool)
    with torch.no_grad():
        model(input_ids=torch.from_numpy(questions.ids), past_key_values=cache, logits_to_keep=1)
        for number in range(questions.asked.shape[1]):
            key, answer = (torch.from_numpy(row[:, number : number + 1]) for row in (questions.asked, questions.answers))
            said = model(input_ids=key, past_key_values=cache).logits[:, -1].argmax(-1)
            right[:, number] = said.numpy() == questions.answers[:, number]
            model(input_ids=answer, past_key_values=cache)
    return float(right.mean())
