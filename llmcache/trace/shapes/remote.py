"""The paper's four applications that infer on a server: bursts of write, read, write, and small hot sets; no loops.

Source: io_caching, section 3.2 and figure 2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from llmcache.trace.record import WRITE, Trace
from llmcache.trace.shapes.recording import LIKE_THE_PAPER, Blocks, Recording, Region

_NOTE = "Shaped like {}, io_caching section 3.2, figure 2{}. " + LIKE_THE_PAPER
FIRST_PROMPT = 5000
END = 200_000  # of the file of prompts: beyond what any seed reaches
SETUP_BLOCKS = 600
MOST_PADDING = 5
# "References around 0 s reappeared near 160 s": a failed prompt is sent again.
RETRY_S = 160.0


@dataclass(frozen=True)
class _Client:
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
        client = Recording(self.name, seed, self._regions())
        hot = np.concatenate([np.arange(*span) for span in self.hot])
        client.touch(np.arange(SETUP_BLOCKS))
        following = FIRST_PROMPT
        for prompt in range(self.prompts):
            client.pause(6)
            following = self._prompt(client, hot, following, prompt in self.retried)
            client.touch(client.picked(hot, int(client.random.integers(5, 60))))
        return client.trace(_NOTE.format(self.title, self.figure))

    def _prompt(self, client: Recording, hot: Blocks, start: int, retry: bool) -> int:
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

    def _regions(self) -> list[Region]:
        first = self.hot[0][1]
        regions = [Region(f"/{self.name}/state.db", 0, first), Region(f"/{self.name}/setup.bin", first, SETUP_BLOCKS)]
        regions += [Region(f"/{self.name}/index.db", *span) for span in self.hot[1:]]
        return [*regions, Region(f"/{self.name}/prompts.dat", FIRST_PROMPT, END)]


def copilot(seed: int = 5) -> Trace:
    """Returns Copilot: bursts of sequential write, read, write; hot blocks near 0 and in a higher range."""
    return _Client("copilot", "Copilot", "a", 60, ((0, 40), (4000, 4080)), 0.05, (100, 900)).trace(seed)


def perplexity(seed: int = 6) -> Trace:
    """Returns Perplexity: many small prompts and so many hot reads at low blocks that they look like loops."""
    client = _Client("perplexity", "Perplexity", "b", 120, ((0, 300),), 0.25, (20, 300), reads_response=False)
    return client.trace(seed)


def claude(seed: int = 7) -> Trace:
    """Returns Claude: hot sets near blocks 0 and 4000; two prompts fail and are read once more."""
    hot = ((0, 60), (4000, 4060))
    return _Client("claude", "Claude", "c", 40, hot, 0.10, (100, 1200), retried=(1, 20)).trace(seed)


def gemini(seed: int = 8) -> Trace:
    """Returns Gemini: sequential bursts, and hot blocks that are touched more rarely than elsewhere."""
    return _Client("gemini", "Gemini", "d", 80, ((0, 80),), 0.02, (50, 500)).trace(seed)
