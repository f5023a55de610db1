"""Synthetic traces: the paper's eight applications, and shapes that are hard to cache.

`SHAPES` maps a name to a function that returns a trace for a seed. Block numbers are those of the paper's figures, which
show all files in one space; `Application` divides it into files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from llmcache.arrays import Bytes, Doubles, Int64s
from llmcache.trace.record import MAP, READ, WRITE, Provenance, Trace, TraceFile
from llmcache.units import BLOCK_BYTES

# Times are invented: each request takes 50 us plus 4.096 us per block (1 GB/s), like the UFS storage of phones.
SETUP_NS = 50_000
BLOCK_NS = 4_096
REQUEST_BLOCKS = 256  # blocks per row at most (1 MiB), so that the progress of a scan is visible
PID = 1000
# Hot references are skewed: block `len * u ** SKEW` for u uniform in 0..1.
SKEW = 2
LONGEST_BURST = 4
# The second part of a note; the first describes the shape.
_LIKE_THE_PAPER = (
    "Synthetic: the ranges of blocks and the kinds of access follow the paper's figure and text; the times, the number "
    "of passes, how often hot blocks are touched, and the sizes of single prompts and responses are invented."
)
_INVENTED = "Synthetic: everything in it is invented."

Files = Mapping[str, tuple[int, int]]
"""The first block of each file in the common space, and the block after its last, by path; ascending."""


class Application:
    """The accesses of an application; `trace` converts them to a trace.

    Times have their own generator, so the blocks do not depend on them.
    """

    def __init__(self, name: str, seed: int, files: Files) -> None:
        self.random = np.random.default_rng(seed)
        self._name, self._seed, self._files = name, seed, files
        self._clock = np.random.default_rng([seed, 1])
        self._blocks: list[Int64s] = []
        self._ops: list[Bytes] = []
        self._pauses: dict[int, int] = {}
        self._touched = 0

    def touch(self, blocks: ArrayLike, op: int = READ) -> None:
        touched = np.asarray(blocks, np.int64)
        self._blocks.append(touched)
        self._ops.append(np.full(len(touched), op, np.uint8))
        self._touched += len(touched)

    def scan(self, start: int, end: int, op: int = READ) -> None:
        self.touch(np.arange(start, end), op)

    def mixed(self, blocks: ArrayLike, hot: Int64s, rate: float, op: int = READ) -> None:
        """Touch `blocks` in order, with bursts of 1 to 4 hot reads at random places: about `rate` per block."""
        stream = np.asarray(blocks, np.int64)
        bursts = self.random.poisson(rate * len(stream) / 2.0)
        places = np.sort(self.random.integers(0, len(stream) + 1, bursts))
        done = 0
        for place in places.tolist():
            self.touch(stream[done:place], op)
            self.touch(self.picked(hot, int(self.random.integers(1, LONGEST_BURST + 1))))
            done = place
        self.touch(stream[done:], op)

    def picked(self, hot: Int64s, number: int) -> Int64s:
        at = (len(hot) * self.random.random(number) ** SKEW).astype(np.int64)
        return hot[np.minimum(at, len(hot) - 1)]

    def shuffled(self, start: int, end: int) -> Int64s:
        blocks = np.arange(start, end)
        self.random.shuffle(blocks)
        return blocks

    def pause(self, seconds: float) -> None:
        """Wait for `seconds` (plus or minus 20 %) before the next access."""
        length_ns = int(seconds * 1e9 * self._clock.uniform(0.8, 1.2))
        self._pauses[self._touched] = self._pauses.get(self._touched, 0) + length_ns

    def trace(self, note: str) -> Trace:
        blocks, ops = np.concatenate(self._blocks), np.concatenate(self._ops)
        starts = np.array([start for start, _ in self._files.values()])
        file = np.searchsorted(starts, blocks, side="right") - 1
        rows = self._row_starts(blocks, ops, file)
        count = np.diff(np.append(rows, len(blocks)))
        files = [
            TraceFile(number, path, dev=1, inode=number + 1, generation=0, size_bytes=(end - start) * BLOCK_BYTES)
            for number, (path, (start, end)) in enumerate(self._files.items())
        ]
        extra = {"shape": self._name, "seed": str(self._seed)}
        provenance = Provenance(tier="synthetic", clock="invented", note=note, extra=extra)
        first = blocks[rows] - starts[file[rows]]
        return Trace.build(
            self._times(rows, count), file[rows], first, count, ops[rows], pid=PID, files=files, provenance=provenance
        )

    def _row_starts(self, blocks: Int64s, ops: Bytes, file: Int64s) -> Int64s:
        begins = np.ones(len(blocks), bool)
        begins[1:] = (np.diff(blocks) != 1) | (np.diff(ops) != 0) | (np.diff(file) != 0)
        begins[[at for at in self._pauses if at < len(blocks)]] = True
        runs = np.flatnonzero(begins)
        lengths = np.diff(np.append(runs, len(blocks)))
        within = np.arange(len(blocks)) - np.repeat(runs, lengths)
        return np.flatnonzero(within % REQUEST_BLOCKS == 0)

    def _times(self, rows: Int64s, count: Int64s) -> Int64s:
        busy = np.concatenate(([0], np.cumsum(SETUP_NS + BLOCK_NS * count)[:-1]))
        waits = np.zeros(len(rows), np.int64)
        for at, length_ns in self._pauses.items():
            if at < self._touched:
                waits[np.searchsorted(rows, at)] += length_ns
        return busy + np.cumsum(waits)


SHAPES: dict[str, Callable[..., Trace]] = {}


def _shape(seed: int, note: str, files: Files) -> Callable[[Callable[[Application], None]], None]:

    def named(acts: Callable[[Application], None]) -> None:
        def trace(seed: int = seed) -> Trace:
            app = Application(acts.__name__, seed, files)
            acts(app)
            return app.trace(note)

        SHAPES[acts.__name__] = trace

    return named


# The paper's applications with inference on the device: a start-up scan, a hot set, and loops over model files. The block
# ranges are from the text; the paper has no other numbers. Source: io_caching, section 3.1, figure 1.


def _on_device(title: str, figure: str) -> str:
    return f"Shaped like {title}, io_caching section 3.1, figure 1{figure}. {_LIKE_THE_PAPER}"


@_shape(
    1,
    _on_device("AI Notes", "a"),
    {
        "/notes/setup.bin": (0, 7400),
        "/notes/engine.idx": (7400, 7700),
        "/notes/handwriting.db": (10_000, 15_000),
        "/notes/translation-weights.bin": (15_000, 25_000),
    },
)
def ai_notes(app: Application) -> None:
    hot = app.shuffled(7400, 7700)
    app.scan(0, 7500)
    for turn in range(12):
        app.pause(8)
        app.mixed(np.arange(15_000, 25_000), hot, 0.05)
        if turn % 2 == 0:
            app.pause(2)
            app.mixed(np.arange(10_000, 15_000), hot, 0.05, WRITE)


@_shape(
    2,
    _on_device("AI Translate", "b"),
    {
        "/translate/setup.bin": (0, 200),
        "/translate/engine.idx": (200, 260),
        "/translate/dictation-source.bin": (300, 550),
        "/translate/copy.db": (600, 700),
        "/translate/dictation-target.bin": (720, 982),
    },
)
def ai_translate(app: Application) -> None:
    hot = app.shuffled(200, 260)
    app.scan(0, 250)
    for turn in range(60):
        app.pause(1)
        for _ in range(int(app.random.integers(1, 4))):
            app.mixed(np.arange(300, 550), hot, 0.1)
            app.pause(0.3)
        if turn % 10 == 5:
            app.scan(600, 700, WRITE)
        for _ in range(int(app.random.integers(0, 3))):
            app.pause(0.3)
            app.mixed(np.arange(720, 982), hot, 0.1)


@_shape(
    3,
    _on_device("Text Embedder", "c"),
    {
        "/embedder/setup.bin": (0, 1300),
        "/embedder/engine.idx": (1300, 1400),
        "/embedder/vocabulary.bin": (1400, 1500),
        "/embedder/cache/model.tflite": (1500, 8000),
    },
)
def text_embedder(app: Application) -> None:
    hot = app.shuffled(1300, 1400)
    app.scan(0, 1500)
    for _ in range(15):
        app.pause(5)
        app.mixed(np.arange(1500, 8000), hot, 0.08, WRITE)
        for _ in range(int(app.random.integers(20, 200))):
            app.pause(0.02)
            app.touch(app.picked(hot, 3))


@_shape(
    4,
    _on_device("Text Classification", "d"),
    {
        "/classification/setup.bin": (0, 100),
        "/classification/engine.idx": (100, 160),
        "/classification/assets.bin": (160, 1800),
        "/classification/cache/model.tflite": (1800, 8000),
    },
)
def text_classification(app: Application) -> None:
    hot = app.shuffled(100, 160)
    app.scan(0, 1800)
    for _ in range(20):
        app.pause(4)
        app.mixed(np.arange(1800, 8000), hot, 0.03, WRITE)
        app.touch(app.picked(hot, 30))


# Applications with inference on a server: bursts of write, read, write, and small hot sets; no loops. Source: section 3.2,
# figure 2.

_FIRST_PROMPT, _PROMPTS_END = 5000, 200_000  # blocks of the file of prompts; no seed reaches its end
_SETUP_BLOCKS = 600
_MOST_PADDING = 5
_RETRY_S = 160.0  # "references around 0 s reappeared near 160 s": a failed prompt is sent again


def _remote(
    seed: int,
    title: str,
    figure: str,
    prompts: int,
    hot_ranges: Sequence[tuple[int, int]],
    hot_rate: float,
    sizes: tuple[int, int],
    retried: Collection[int] = (),
    reads_response: bool = True,
) -> None:
    """Add a client that saves each prompt, reads it to send it, and saves the response.

    `sizes`: the range of prompt sizes in blocks; prompts numbered in `retried` are sent twice.
    """
    name, first = title.lower(), hot_ranges[0][1]
    files = {f"/{name}/state.db": (0, first), f"/{name}/setup.bin": (first, _SETUP_BLOCKS)}
    files |= {f"/{name}/index.db": span for span in hot_ranges[1:]}
    files[f"/{name}/prompts.dat"] = (_FIRST_PROMPT, _PROMPTS_END)

    def client(app: Application) -> None:
        hot = np.concatenate([np.arange(*span) for span in hot_ranges])
        app.scan(0, _SETUP_BLOCKS)
        start = _FIRST_PROMPT
        for prompt in range(prompts):
            app.pause(6)
            size = int(app.random.integers(*sizes))
            saved = np.arange(start, start + size)
            start += size + int(app.random.integers(0, _MOST_PADDING))
            response = np.arange(start, start + size // 3 + 1)
            start += len(response)
            app.mixed(saved, hot, hot_rate, WRITE)
            app.mixed(saved, hot, hot_rate)
            app.pause(2)
            app.mixed(response, hot, hot_rate, WRITE)
            if reads_response:
                app.mixed(response, hot, hot_rate)
            if prompt in retried:
                app.pause(_RETRY_S)
                app.mixed(saved, hot, hot_rate)
            app.touch(app.picked(hot, int(app.random.integers(5, 60))))

    client.__name__ = name
    _shape(seed, f"Shaped like {title}, io_caching section 3.2, figure 2{figure}. {_LIKE_THE_PAPER}", files)(client)


# Hot blocks near 0 and in a higher range.
_remote(5, "Copilot", "a", 60, ((0, 40), (4000, 4080)), 0.05, (100, 900))
# Many small prompts. Hot reads at low blocks are so frequent that they look like loops.
_remote(6, "Perplexity", "b", 120, ((0, 300),), 0.25, (20, 300), reads_response=False)
# Hot sets near blocks 0 and 4000; two prompts fail and are read once more.
_remote(7, "Claude", "c", 40, ((0, 60), (4000, 4060)), 0.10, (100, 1200), retried=(1, 20))
# Hot blocks that are touched more rarely than elsewhere.
_remote(8, "Gemini", "d", 80, ((0, 80),), 0.02, (50, 500))


# Shapes that are hard to cache, or that a loop detector easily misclassifies: several readers, noise, repeats, disorder,
# random access, several models, partial reads, MoE models.

_NOISE = (10**6, 10**7)


@_shape(
    11,
    f"Two models read in lock step. {_INVENTED}",
    {"/app/setup.bin": (0, 2000), "/app/model-a.gguf": (10_000, 16_000), "/app/model-b.gguf": (30_000, 36_000)},
)
def interleave(app: Application) -> None:
    hot = np.arange(100)
    app.scan(0, 2000)
    for _ in range(15):
        app.pause(0.1)
        app.touch(np.stack([np.arange(10_000, 16_000), np.arange(30_000, 36_000)], axis=1).ravel())
        app.touch(app.picked(hot, 50))


@_shape(
    12,
    f"A loop with one reference of noise or to a hot block after every two blocks. {_INVENTED}",
    {
        "/app/engine.idx": (0, 300),
        "/app/setup.bin": (300, 3000),
        "/app/model.gguf": (10_000, 20_000),
        "/app/archive.db": _NOISE,
    },
)
def noisy(app: Application) -> None:
    hot = app.shuffled(0, 300)
    app.scan(0, 3000)
    loop = np.arange(10_000, 20_000)
    for _ in range(15):
        app.pause(0.1)
        between = np.concatenate([app.picked(hot, len(loop) // 3), app.random.integers(*_NOISE, len(loop) // 6)])
        app.random.shuffle(between)
        app.touch(np.insert(loop, np.sort(app.random.integers(0, len(loop), len(between))), between))


def kilobytes(seed: int = 13) -> Trace:
    """Return AI Notes with requests of 1 KiB: every block is touched four times in a row."""
    notes = SHAPES["ai_notes"](seed)
    count = notes.count.astype(np.int64)
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    row = np.repeat(np.arange(len(notes)), count)
    step_ns = 1_024  # a quarter of a block at 1 GB/s: rows of AI Notes never overlap
    at = np.repeat(notes.t_ns[row].astype(np.int64) + 4 * step_ns * within, 4) + np.tile(step_ns * np.arange(4), len(row))
    repeated, first = np.repeat(row, 4), np.repeat(notes.first[row].astype(np.int64) + within, 4)
    note = f"AI Notes in requests of 1 KiB. {notes.provenance.note}"
    provenance = dataclasses.replace(notes.provenance, note=note, extra={"shape": "kilobytes", "seed": str(seed)})
    file, op, pid = notes.file[repeated], notes.op[repeated], notes.pid[repeated]
    return Trace.build(at, file, first, 1, op, pid=pid, files=notes.files, provenance=provenance)


SHAPES["kilobytes"] = kilobytes


@_shape(
    14,
    f"Model A in a loop, then B, A again, and C. {_INVENTED}",
    {
        "/app/engine.idx": (0, 200),
        "/app/setup.bin": (200, 3000),
        "/app/model-a.gguf": (9500, 14_000),
        "/app/model-b.gguf": (29_500, 39_000),
        "/app/model-c.gguf": (49_500, 56_000),
    },
)
def model_switch(app: Application) -> None:
    hot = app.shuffled(0, 200)
    app.scan(0, 3000)
    for start, blocks, passes in ((10_000, 4000, 12), (30_000, 9000, 12), (10_000, 4000, 8), (50_000, 6000, 12)):
        app.pause(5)
        app.scan(start - 500, start)
        for _ in range(passes):
            app.pause(0.1)
            app.mixed(np.arange(start, start + blocks), hot, 0.05)


@_shape(
    15,
    f"Prefill reads all of the model, decoding a part of each layer. {_INVENTED}",
    {
        "/app/engine.idx": (0, 200),
        "/app/setup.bin": (200, 3000),
        "/app/embedding.bin": (5000, 7000),
        "/app/model.gguf": (10_000, 19_600),
    },
)
def prefill_decode(app: Application) -> None:
    layers, embeddings = np.arange(10_000, 19_600).reshape(24, 400), np.arange(5000, 7000)
    hot = app.shuffled(0, 200)
    app.scan(0, 3000)
    for _ in range(6):
        app.pause(10)
        for _ in range(2):
            app.pause(0.5)
            app.touch(app.picked(embeddings, 128))
            app.mixed(layers.ravel(), hot, 0.02)
        for _ in range(int(app.random.integers(4, 9))):
            app.pause(0.1)
            app.touch(app.picked(embeddings, 2))
            for layer in layers:
                app.mixed(layer[:280], hot, 0.02)


_MOE_LAYERS, _MOE_EXPERTS, _MOE_BLOCKS = 8, 16, 60  # _MOE_BLOCKS: size of an expert, and of the shared part of a layer
_MOE_LAYER_BLOCKS = _MOE_BLOCKS * (1 + _MOE_EXPERTS)


@_shape(
    16,
    f"Mixture of experts: 2 of 16 per layer, popular ones more often, kept with probability 0.35. {_INVENTED}",
    {
        "/app/engine.idx": (0, 200),
        "/app/setup.bin": (200, 2000),
        "/app/experts.gguf": (10_000, 10_000 + _MOE_LAYERS * _MOE_LAYER_BLOCKS),
    },
)
def moe_routing(app: Application) -> None:
    hot = app.shuffled(0, 200)
    app.scan(0, 2000)
    weights: Doubles = 1 / np.arange(1, _MOE_EXPERTS + 1) ** 0.8
    weights /= weights.sum()

    def routed() -> Int64s:
        return app.random.choice(_MOE_EXPERTS, 2, replace=False, p=weights)

    placed = [app.random.permutation(_MOE_EXPERTS) for _ in range(_MOE_LAYERS)]
    chosen = [routed() for _ in range(_MOE_LAYERS)]
    for _ in range(120):
        app.pause(0.1)
        for layer in range(_MOE_LAYERS):
            if app.random.random() > 0.35:
                chosen[layer] = routed()
            start = 10_000 + layer * _MOE_LAYER_BLOCKS
            app.mixed(np.arange(start, start + _MOE_BLOCKS), hot, 0.02, MAP)
            for expert in sorted(placed[layer][chosen[layer]].tolist()):
                app.scan(start + (1 + expert) * _MOE_BLOCKS, start + (2 + expert) * _MOE_BLOCKS, MAP)


@_shape(
    17,
    f"Four threads read each layer together; the order of their blocks varies. {_INVENTED}",
    {"/app/engine.idx": (0, 200), "/app/setup.bin": (200, 2000), "/app/model.gguf": (10_000, 19_600)},
)
def page_order(app: Application) -> None:
    hot = np.arange(200)
    app.scan(0, 2000)
    for _ in range(15):
        app.pause(0.1)
        for layer in np.arange(10_000, 19_600).reshape(30, 320):
            turns = layer.reshape(4, -1).T.ravel()
            app.touch(turns[np.argsort(np.arange(len(layer)) + app.random.uniform(0, 8, len(layer)))])
            app.touch(app.picked(hot, 3))


@_shape(18, f"Blocks drawn at random, low ones more often. {_INVENTED}", {"/app/store.db": (0, 20_000)})
def random(app: Application) -> None:
    app.touch((20_000 * app.random.random(200_000) ** 3).astype(np.int64))


@_shape(
    19,
    f"Four loops: the shorter the loop, the shorter its period. {_INVENTED}",
    {
        "/app/engine.idx": (0, 200),
        "/app/setup.bin": (200, 1500),
        "/app/draft.gguf": (5000, 5800),
        "/app/encoder.gguf": (10_000, 13_000),
        "/app/decoder.gguf": (20_000, 26_000),
        "/app/vision.gguf": (40_000, 52_000),
    },
)
def multi_loop(app: Application) -> None:
    hot = app.shuffled(0, 200)
    app.scan(0, 1500)
    for turn in range(44):
        app.pause(0.2)
        for start, blocks, every in ((5000, 800, 1), (10_000, 3000, 2), (20_000, 6000, 5), (40_000, 12_000, 11)):
            if turn % every == every - 1:
                app.mixed(np.arange(start, start + blocks), hot, 0.03)


@_shape(
    20,
    f"Copies of a packaged model, a journal written over and over, and rare reads of the copy. {_INVENTED}",
    {
        "/app/engine.idx": (0, 150),
        "/app/base.apk": (1000, 5000),
        "/app/cache/model.tflite": (6000, 10_000),
        "/app/journal.db": (20_000, 20_400),
    },
)
def write_loops(app: Application) -> None:
    hot = app.shuffled(0, 150)
    app.scan(0, 150)
    for turn in range(18):
        app.pause(3)
        for chunk in range(0, 4000, 200):
            app.scan(1000 + chunk, 1200 + chunk)
            app.mixed(np.arange(6000 + chunk, 6200 + chunk), hot, 0.05, WRITE)
        app.scan(20_000, 20_400, WRITE)
        if turn % 3 == 2:
            app.mixed(np.arange(6000, 10_000), hot, 0.05)


_NAMES = tuple(SHAPES)
GROUPS: Mapping[str, tuple[str, ...]] = {"on_device": _NAMES[:4], "remote": _NAMES[4:8], "hard": _NAMES[8:]}
