"""Accuracy of the recall model by policy: the same as without a spilled cache where everything is kept, less where not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmcache.errors import DataError
from llmcache.kv.tasks import RECALL_MODEL, Questions, recall
from llmcache.kv.transformers.recall import accuracy, load_model


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(RECALL_MODEL)


@pytest.fixture(scope="module")
def questions() -> Questions:
    return recall(np.random.default_rng(4), 4, 1024, questions=8)


def test_what_is_kept_is_known_and_what_is_not_is_forgotten(model: Any, questions: Questions) -> None:
    plain = accuracy(model, questions)
    assert plain >= 0.9
    assert accuracy(model, questions, "full") == plain
    assert accuracy(model, questions, "hillinfer", alpha=0.2) >= plain - 0.05
    assert accuracy(model, questions, "window", alpha=0.1) < plain - 0.3


def test_torch_has_its_threads_again(model: Any, questions: Questions) -> None:
    before = torch.get_num_threads()
    accuracy(model, questions)
    assert torch.get_num_threads() == before


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a model"):
        load_model(tmp_path)
