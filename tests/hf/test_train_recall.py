"""The script that trains the recall model: its lessons say what they should, and a few steps of it go through."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from llmcache.errors import UsageError
from tools.train_recall import copying, far_recalling, recalling, train


def test_what_is_to_be_foreseen_can_be() -> None:
    rng = np.random.default_rng(0)
    copied = copying(rng, 4, 64)
    for ids, foreseen in zip(copied.ids, copied.foreseen, strict=True):
        period = int(np.flatnonzero(ids[1:] == ids[0])[0]) + 1
        places = np.flatnonzero(foreseen)
        assert (ids[places] == ids[places - period]).all()
        assert len(places) == 64 - period - 1
    lesson = recalling(rng, 4, 256)
    assert lesson.ids.shape == (4, 256)
    for ids, foreseen in zip(lesson.ids, lesson.foreseen, strict=True):
        for place in np.flatnonzero(foreseen):
            first = np.flatnonzero(ids == ids[place - 1])[0]
            assert first < place - 1
            assert ids[first + 1] == ids[place]


def test_positions_jump_but_never_back() -> None:
    lesson = far_recalling(np.random.default_rng(0), 512)
    assert lesson.positions is not None
    steps = np.diff(lesson.positions)
    assert (steps >= 1).all()
    assert 1 <= (steps > 1).sum() <= 2
    assert lesson.positions.max() < 8192


def test_a_few_steps_write_a_model(tmp_path: Path) -> None:
    options = argparse.Namespace(out=tmp_path, start=None, short_steps=2, long_steps=1, contexts=1, threads=2, seed=3)
    result = train(options, lambda line: None)
    assert set(result["known"]) == {512, 1024, 2048, 4096}
    assert result["known"][512] < 0.5
    assert (tmp_path / "model.safetensors").stat().st_size > 1_800_000
    with pytest.raises(UsageError, match=r"OUT: .* is not empty"):
        train(options, lambda line: None)
