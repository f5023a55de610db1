"""The paper's eight applications: four that infer on the device, four that do on a server.

On the device: a start-up scan, a hot set, and loops over model files. On a server: bursts of write, read, write, and small
hot sets; no loops. Block ranges are those of the text; the paper prints no other numbers.
Source: io_caching, sections 3.1 and 3.2, figures 1 and 2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from llmcache.arrays import Int64s
from llmcache.trace.record import WRITE, Trace
from llmcache.trace.shapes.application import LIKE_THE_PAPER, Application, FileRange

_ON_DEVICE = "Shaped like {}, io_caching section 3.1, figure 1{}. " + LIKE_THE_PAPER
_REMOTE = "Shaped like {}, io_caching section 3.2, figure 2{}. " + LIKE_THE_PAPER
FIRST_PROMPT = 5000
END = 200_000  # of the file of prompts: beyond what any seed reaches
SETUP_BLOCKS = 600
MOST_PADDING = 5
# "References around 0 s reappeared near 160 s": a failed prompt is sent again.
RETRY_S = 160.0


def ai_notes(seed: int = 1) -> Trace:
    """Returns AI Notes: scan of 0-7500, hot set near 7500, write loop over 10,000-15,000, read loop 15,000-25,000."""
    notes = Application(
        "ai_notes",
        seed,
        [
            FileRange("/notes/setup.bin", 0, 7400),
            FileRange("/notes/engine.idx", 7400, 7700),
            FileRange("/notes/handwriting.db", 10_000, 15_000),
            FileRange("/notes/translation-weights.bin", 15_000, 25_000),
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
    return notes.trace(_ON_DEVICE.format("AI Notes", "a"))


def ai_translate(seed: int = 2) -> Trace:
    """Returns AI Translate: two read loops (source and target dictation models) and database copies at 600-700."""
    translate = Application(
        "ai_translate",
        seed,
        [
            FileRange("/translate/setup.bin", 0, 200),
            FileRange("/translate/engine.idx", 200, 260),
            FileRange("/translate/dictation-source.bin", 300, 550),
            FileRange("/translate/copy.db", 600, 700),
            FileRange("/translate/dictation-target.bin", 720, 982),
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
    return translate.trace(_ON_DEVICE.format("AI Translate", "b"))


def text_embedder(seed: int = 3) -> Trace:
    """Returns Text Embedder: model files copied again and again to 1500-8000, and hot reads between the copies."""
    embedder = Application(
        "text_embedder",
        seed,
        [
            FileRange("/embedder/setup.bin", 0, 1300),
            FileRange("/embedder/engine.idx", 1300, 1400),
            FileRange("/embedder/vocabulary.bin", 1400, 1500),
            FileRange("/embedder/cache/model.tflite", 1500, 8000),
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
    return embedder.trace(_ON_DEVICE.format("Text Embedder", "c"))


def text_classification(seed: int = 4) -> Trace:
    """Returns Text Classification: a start-up scan, then writes prevail: the model copied to 1800-8000 in a loop."""
    classification = Application(
        "text_classification",
        seed,
        [
            FileRange("/classification/setup.bin", 0, 100),
            FileRange("/classification/engine.idx", 100, 160),
            FileRange("/classification/assets.bin", 160, 1800),
            FileRange("/classification/cache/model.tflite", 1800, 8000),
        ],
    )
    hot = classification.shuffled(100, 160)
    classification.touch(np.arange(1800))
    for _ in range(20):
        classification.pause(4)
        classification.mixed(np.arange(1800, 8000), hot, 0.03, WRITE)
        classification.touch(classification.picked(hot, 30))
    return classification.trace(_ON_DEVICE.format("Text Classification", "d"))


@dataclass(frozen=True)
class _RemoteClient:
    """What tells one remote application from another. `hot` are ranges; `sizes` bound the blocks of a prompt."""

    name: str
    title: str
    figure: str
    prompts: int
    hot: Sequence[tuple[int, int]]
    hot_rate: float
    sizes: tuple[int, int]
    retried: Collection[int] = ()
    reads_response: bool = True

    def trace(self, seed: int) -> Trace:
        client = Application(self.name, seed, self._regions())
        hot = np.concatenate([np.arange(*span) for span in self.hot])
        client.touch(np.arange(SETUP_BLOCKS))
        following = FIRST_PROMPT
        for prompt in range(self.prompts):
            client.pause(6)
            following = self._prompt(client, hot, following, prompt in self.retried)
            client.touch(client.picked(hot, int(client.random.integers(5, 60))))
        return client.trace(_REMOTE.format(self.title, self.figure))

    def _prompt(self, client: Application, hot: Int64s, start: int, retry: bool) -> int:
        """Save a prompt, read it to send it, save the response, show it; returns the next free block."""
        size = int(client.random.integers(*self.sizes))
        saved = np.arange(start, start + size)
        start += size + int(client.random.integers(0, MOST_PADDING))
        response = np.arange(start, start + size // 3 + 1)
        client.mixed(saved, hot, self.hot_rate, WRITE)
        client.mixed(saved, hot, self.hot_rate)
        client.pause(2)
        client.mixed(response, hot, self.hot_rate, WRITE)
        if self.reads_response:
            client.mixed(response, hot, self.hot_rate)
        if retry:
            client.pause(RETRY_S)
            client.mixed(saved, hot, self.hot_rate)
        return start + len(response)

    def _regions(self) -> list[FileRange]:
        first = self.hot[0][1]
        regions = [FileRange(f"/{self.name}/state.db", 0, first), FileRange(f"/{self.name}/setup.bin", first, SETUP_BLOCKS)]
        regions += [FileRange(f"/{self.name}/index.db", *span) for span in self.hot[1:]]
        return [*regions, FileRange(f"/{self.name}/prompts.dat", FIRST_PROMPT, END)]


def copilot(seed: int = 5) -> Trace:
    """Returns Copilot: bursts of sequential write, read, write; hot blocks near 0 and in a higher range."""
    return _RemoteClient("copilot", "Copilot", "a", 60, ((0, 40), (4000, 4080)), 0.05, (100, 900)).trace(seed)


def perplexity(seed: int = 6) -> Trace:
    """Returns Perplexity: many small prompts and so many hot reads at low blocks that they look like loops."""
    client = _RemoteClient("perplexity", "Perplexity", "b", 120, ((0, 300),), 0.25, (20, 300), reads_response=False)
    return client.trace(seed)


def claude(seed: int = 7) -> Trace:
    """Returns Claude: hot sets near blocks 0 and 4000; two prompts fail and are read once more."""
    hot = ((0, 60), (4000, 4060))
    return _RemoteClient("claude", "Claude", "c", 40, hot, 0.10, (100, 1200), retried=(1, 20)).trace(seed)


def gemini(seed: int = 8) -> Trace:
    """Returns Gemini: sequential bursts, and hot blocks that are touched more rarely than elsewhere."""
    return _RemoteClient("gemini", "Gemini", "d", 80, ((0, 80),), 0.02, (50, 500)).trace(seed)
