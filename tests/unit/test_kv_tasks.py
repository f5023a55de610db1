"""Questions about long contexts: each answer is in its context, behind its key, exactly once."""

import hashlib
import re

import numpy as np
import pytest

from llmcache.errors import UsageError
from llmcache.kv.tasks import RECALL_MODEL, Questions, chain, multikey, passkey, recall
from llmcache.kv.tasks.recall import BEGINNING, FIRST_KEY, FIRST_NOISE, FIRST_VALUE, VOCABULARY


def check_answers(found: Questions, tokens: int, pairs: int) -> None:
    assert found.ids.shape[1] == tokens
    assert (found.ids[:, 0] == BEGINNING).all()
    assert found.ids.max() < VOCABULARY
    for ids, asked, answers in zip(found.ids, found.asked, found.answers, strict=True):
        is_key = (ids >= FIRST_KEY) & (ids < FIRST_VALUE)
        assert is_key.sum() == pairs
        assert ((ids >= FIRST_VALUE) & (ids < FIRST_NOISE)).sum() == pairs
        for key, answer in zip(asked, answers, strict=True):
            (place,) = np.flatnonzero(ids == key)
            assert ids[place + 1] == answer


@pytest.mark.parametrize("tokens", [129, 500])
def test_recall_asks_for_pairs_that_are_there(tokens: int) -> None:
    check_answers(recall(np.random.default_rng(1), 3, tokens), tokens, 64)


def test_many_keys_are_all_asked_for() -> None:
    found = multikey(np.random.default_rng(1), 2, 100)
    check_answers(found, 100, 16)
    assert all(len(set(asked)) == 16 for asked in found.asked.tolist())


@pytest.mark.parametrize(("depth", "place"), [(0, 1), (0.5, 45), (1, 90)])
def test_a_passkey_lies_at_its_depth(depth: float, place: int) -> None:
    found = passkey(np.random.default_rng(1), 2, 100, depth=depth, symbols=5)
    check_answers(found, 100, 5)
    assert (found.ids[:, place] == found.asked[:, 0]).all()


def test_a_text_with_answers_goes_on_where_the_context_ends() -> None:
    found = recall(np.random.default_rng(1), 2, 200, questions=4)
    text = found.with_answers()
    assert (text[:, :200] == found.ids).all()
    assert (text[:, 200::2] == found.asked).all()
    assert (text[:, 201::2] == found.answers).all()


@pytest.mark.parametrize("pairs", [5, 64])
def test_a_chain_leads_through_all_pairs_and_back(pairs: int) -> None:
    found = chain(np.random.default_rng(1), 3, 300, steps=pairs + 2, pairs=pairs)
    keys, asked = found.first, []
    for step in range(pairs + 2):
        asked.append(keys)
        keys = found.next_keys(found.answers[:, step])
    questions = Questions(found.ids, np.stack(asked[:pairs], 1), found.answers[:, :pairs])
    check_answers(questions, 300, pairs)
    assert all(len(set(row)) == pairs for row in questions.asked.tolist())
    assert (asked[pairs] == found.first).all()


def test_a_wrong_answer_leads_astray() -> None:
    found = chain(np.random.default_rng(1), 2, 300, steps=4)
    right = found.next_keys(found.answers[:, 0])
    assert (found.next_keys(found.answers[:, 1]) != right).all()
    assert (found.next_keys(np.full(2, BEGINNING)) == found.first).all()


def test_what_does_not_fit_is_refused() -> None:
    rng = np.random.default_rng(1)
    with pytest.raises(UsageError, match="tokens: 128"):
        recall(rng, 1, 128)
    with pytest.raises(UsageError, match="pairs: 513"):
        recall(rng, 1, 5000, pairs=513)
    with pytest.raises(UsageError, match="depth: "):
        passkey(rng, 1, 100, depth=1.5)
    with pytest.raises(UsageError, match="tokens: 10"):
        passkey(rng, 1, 10, depth=0, symbols=5)
    with pytest.raises(UsageError, match="pairs: 65"):
        chain(rng, 1, 300, steps=3, pairs=65)


def test_the_weights_are_those_of_their_provenance() -> None:
    written = re.search(r"SHA-256 of model.safetensors: ([0-9a-f]{64})", (RECALL_MODEL / "PROVENANCE.md").read_text())
    assert written
    assert hashlib.sha256((RECALL_MODEL / "model.safetensors").read_bytes()).hexdigest() == written[1]
