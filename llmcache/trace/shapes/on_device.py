"""The paper's four applications that infer on the device: start-up scan, hot set, and loops over model files.

Source: io_caching, section 3.1 and figure 1. Block ranges are those of the text; the paper prints no other numbers.
"""

from __future__ import annotations

import numpy as np

from llmcache.trace.record import WRITE, Trace
from llmcache.trace.shapes.recording import LIKE_THE_PAPER, Recording, Region

_NOTE = "Shaped like {}, io_caching section 3.1, figure 1{}. " + LIKE_THE_PAPER


def ai_notes(seed: int = 1) -> Trace:
    """Returns AI Notes: scan of 0-7500, hot set near 7500, write loop over 10,000-15,000, read loop 15,000-25,000."""
    notes = Recording(
        "ai_notes",
        seed,
        [
            Region("/notes/setup.bin", 0, 7400),
            Region("/notes/engine.idx", 7400, 7700),
            Region("/notes/handwriting.db", 10_000, 15_000),
            Region("/notes/translation-weights.bin", 15_000, 25_000),
        ],
    )
    hot = notes.shuffled(7400, 7700)
    notes.touch(np.arange(7500))
    for turn in range(12):
        notes.pause(8)
        notes.mixed(np.arange(15_000, 25_000), hot, 0.05)
        if turn % 2 == 0:
            notes.pause(2)
            notes.mixed(np.arange(10_000, 15_000), hot, 0.05, WRITE)
    return notes.trace(_NOTE.format("AI Notes", "a"))


def ai_translate(seed: int = 2) -> Trace:
    """Returns AI Translate: two read loops (source and target dictation models) and database copies at 600-700."""
    translate = Recording(
        "ai_translate",
        seed,
        [
            Region("/translate/setup.bin", 0, 200),
            Region("/translate/engine.idx", 200, 260),
            Region("/translate/dictation-source.bin", 300, 550),
            Region("/translate/copy.db", 600, 700),
            Region("/translate/dictation-target.bin", 720, 982),
        ],
    )
    hot = translate.shuffled(200, 260)
    translate.touch(np.arange(250))
    for turn in range(60):
        translate.pause(1)
        for _ in range(int(translate.random.integers(1, 4))):
            translate.mixed(np.arange(300, 550), hot, 0.1)
            translate.pause(0.3)
        if turn % 10 == 5:
            translate.touch(np.arange(600, 700), WRITE)
        for _ in range(int(translate.random.integers(0, 3))):
            translate.pause(0.3)
            translate.mixed(np.arange(720, 982), hot, 0.1)
    return translate.trace(_NOTE.format("AI Translate", "b"))


def text_embedder(seed: int = 3) -> Trace:
    """Returns Text Embedder: model files copied again and again to 1500-8000, and hot reads between the copies."""
    embedder = Recording(
        "text_embedder",
        seed,
        [
            Region("/embedder/setup.bin", 0, 1300),
            Region("/embedder/engine.idx", 1300, 1400),
            Region("/embedder/vocabulary.bin", 1400, 1500),
            Region("/embedder/cache/model.tflite", 1500, 8000),
        ],
    )
    hot = embedder.shuffled(1300, 1400)
    embedder.touch(np.arange(1500))
    for _ in range(15):
        embedder.pause(5)
        embedder.mixed(np.arange(1500, 8000), hot, 0.08, WRITE)
        for _ in range(int(embedder.random.integers(20, 200))):
            embedder.pause(0.02)
            embedder.touch(embedder.picked(hot, 3))
    return embedder.trace(_NOTE.format("Text Embedder", "c"))


def text_classification(seed: int = 4) -> Trace:
    """Returns Text Classification: a start-up scan, then writes prevail: the model copied to 1800-8000 in a loop."""
    classification = Recording(
        "text_classification",
        seed,
        [
            Region("/classification/setup.bin", 0, 100),
            Region("/classification/engine.idx", 100, 160),
            Region("/classification/assets.bin", 160, 1800),
            Region("/classification/cache/model.tflite", 1800, 8000),
        ],
    )
    hot = classification.shuffled(100, 160)
    classification.touch(np.arange(1800))
    for _ in range(20):
        classification.pause(4)
        classification.mixed(np.arange(1800, 8000), hot, 0.03, WRITE)
        classification.touch(classification.picked(hot, 30))
    return classification.trace(_NOTE.format("Text Classification", "d"))
