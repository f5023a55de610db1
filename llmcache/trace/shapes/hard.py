"""Shapes that are hard to cache, or that a detector of loops gets wrong easily.

Several readers, noise, repeats, disorder, no order at all; several models, parts of them, mixtures of experts.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from llmcache.arrays import Doubles, Int64s
from llmcache.trace.record import MAP, WRITE, Trace
from llmcache.trace.shapes.application import INVENTED, Application, FileRange
from llmcache.trace.shapes.paper import ai_notes

_NOISE = (10**6, 10**7)


def interleave(seed: int = 11) -> Trace:
    """Returns two threads that read a model each, in lock step: no two accesses in a row are adjacent."""
    threads = Application(
        "interleave",
        seed,
        [
            FileRange("/app/setup.bin", 0, 2000),
            FileRange("/app/model-a.gguf", 10_000, 16_000),
            FileRange("/app/model-b.gguf", 30_000, 36_000),
        ],
    )
    hot = np.arange(100)
    threads.touch(np.arange(2000))
    for _ in range(15):
        threads.pause(0.1)
        threads.touch(np.stack([np.arange(10_000, 16_000), np.arange(30_000, 36_000)], axis=1).ravel())
        threads.touch(threads.picked(hot, 50))
    return threads.trace(f"Two models read in lock step. {INVENTED}")


def noisy(seed: int = 12) -> Trace:
    """Returns a loop in which every other access is a hot block or one that never comes back."""
    app = Application(
        "noisy",
        seed,
        [
            FileRange("/app/engine.idx", 0, 300),
            FileRange("/app/setup.bin", 300, 3000),
            FileRange("/app/model.gguf", 10_000, 20_000),
            FileRange("/app/archive.db", *_NOISE),
        ],
    )
    hot = app.shuffled(0, 300)
    app.touch(np.arange(3000))
    loop = np.arange(10_000, 20_000)
    for _ in range(15):
        app.pause(0.1)
        between = np.concatenate([app.picked(hot, len(loop) // 3), app.random.integers(*_NOISE, len(loop) // 6)])
        app.random.shuffle(between)
        app.touch(np.insert(loop, np.sort(app.random.integers(0, len(loop), len(between))), between))
    return app.trace(f"A loop with one reference of noise or to a hot block after every two blocks. {INVENTED}")


def kilobytes(seed: int = 13) -> Trace:
    """Returns AI Notes read and written in requests of 1 KiB: every block is touched four times in a row."""
    notes = ai_notes(seed)
    count = notes.count.astype(np.int64)
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    row = np.repeat(np.arange(len(notes)), count)
    step_ns = 1_024  # a quarter of a block at 1 GB/s: rows of AI Notes never overlap
    at = np.repeat(notes.t_ns[row].astype(np.int64) + 4 * step_ns * within, 4) + np.tile(step_ns * np.arange(4), len(row))
    repeated = np.repeat(row, 4)
    provenance = dataclasses.replace(
        notes.provenance,
        note=f"AI Notes in requests of 1 KiB. {notes.provenance.note}",
        extra={"shape": "kilobytes", "seed": str(seed)},
    )
    return Trace.build(
        at,
        notes.file[repeated],
        np.repeat(notes.first[row].astype(np.int64) + within, 4),
        1,
        notes.op[repeated],
        pid=notes.pid[repeated],
        files=notes.files,
        provenance=provenance,
    )


def page_order(seed: int = 17) -> Trace:
    """Returns a loop whose layers are read by four threads at once: blocks arrive out of order, within a window of 32."""
    layers, blocks = 30, 320
    app = Application(
        "page_order",
        seed,
        [
            FileRange("/app/engine.idx", 0, 200),
            FileRange("/app/setup.bin", 200, 2000),
            FileRange("/app/model.gguf", 10_000, 10_000 + layers * blocks),
        ],
    )
    hot = np.arange(200)
    app.touch(np.arange(2000))
    for _ in range(15):
        app.pause(0.1)
        for layer in range(layers):
            start = 10_000 + layer * blocks
            turns = np.arange(start, start + blocks).reshape(4, -1).T.ravel()
            app.touch(turns[np.argsort(np.arange(blocks) + app.random.uniform(0, 8, blocks))])
            app.touch(app.picked(hot, 3))
    return app.trace(f"Four threads read each layer together; the order of their blocks varies. {INVENTED}")


def random(seed: int = 18) -> Trace:
    """Returns single blocks drawn from a skewed distribution: no structure to find."""
    app = Application("random", seed, [FileRange("/app/store.db", 0, 20_000)])
    app.touch((20_000 * app.random.random(200_000) ** 3).astype(np.int64))
    return app.trace(f"Blocks drawn at random, low ones more often. {INVENTED}")


def write_loops(seed: int = 20) -> Trace:
    """Returns a model copied out of its package again and again, read back whole only every third time."""
    app = Application(
        "write_loops",
        seed,
        [
            FileRange("/app/engine.idx", 0, 150),
            FileRange("/app/base.apk", 1000, 5000),
            FileRange("/app/cache/model.tflite", 6000, 10_000),
            FileRange("/app/journal.db", 20_000, 20_400),
        ],
    )
    hot = app.shuffled(0, 150)
    app.touch(np.arange(150))
    for turn in range(18):
        app.pause(3)
        for chunk in range(0, 4000, 200):
            app.touch(np.arange(1000 + chunk, 1200 + chunk))
            app.mixed(np.arange(6000 + chunk, 6200 + chunk), hot, 0.05, WRITE)
        app.touch(np.arange(20_000, 20_400), WRITE)
        if turn % 3 == 2:
            app.mixed(np.arange(6000, 10_000), hot, 0.05)
    return app.trace(f"Copies of a packaged model, a journal written over and over, and rare reads of the copy. {INVENTED}")


def model_switch(seed: int = 14) -> Trace:
    """Returns model A read in a loop, then B, then A again, then C: old loops must be forgotten, and found again."""
    models = ((10_000, 4000, 12), (30_000, 9000, 12), (10_000, 4000, 8), (50_000, 6000, 12))
    app = Application(
        "model_switch",
        seed,
        [
            FileRange("/app/engine.idx", 0, 200),
            FileRange("/app/setup.bin", 200, 3000),
            FileRange("/app/model-a.gguf", 9500, 14_000),
            FileRange("/app/model-b.gguf", 29_500, 39_000),
            FileRange("/app/model-c.gguf", 49_500, 56_000),
        ],
    )
    hot = app.shuffled(0, 200)
    app.touch(np.arange(3000))
    for start, blocks, passes in models:
        app.pause(5)
        app.touch(np.arange(start - 500, start))
        for _ in range(passes):
            app.pause(0.1)
            app.mixed(np.arange(start, start + blocks), hot, 0.05)
    return app.trace(f"Model A in a loop, then B, A again, and C. {INVENTED}")


def prefill_decode(seed: int = 15) -> Trace:
    """Returns six requests: prefill reads the model whole, each token then 70 % of every layer and two embeddings."""
    layers, blocks, active = 24, 400, 280
    base = 10_000
    app = Application(
        "prefill_decode",
        seed,
        [
            FileRange("/app/engine.idx", 0, 200),
            FileRange("/app/setup.bin", 200, 3000),
            FileRange("/app/embedding.bin", 5000, 7000),
            FileRange("/app/model.gguf", base, base + layers * blocks),
        ],
    )
    hot, embeddings = app.shuffled(0, 200), np.arange(5000, 7000)
    app.touch(np.arange(3000))
    for _ in range(6):
        app.pause(10)
        for _ in range(2):
            app.pause(0.5)
            app.touch(app.picked(embeddings, 128))
            app.mixed(np.arange(base, base + layers * blocks), hot, 0.02)
        for _ in range(int(app.random.integers(4, 9))):
            app.pause(0.1)
            app.touch(app.picked(embeddings, 2))
            for layer in range(layers):
                start = base + layer * blocks
                app.mixed(np.arange(start, start + active), hot, 0.02)
    return app.trace(f"Prefill reads all of the model, decoding a part of each layer. {INVENTED}")


def moe_routing(seed: int = 16) -> Trace:
    """Returns a mapped mixture of experts: per token and layer the shared part and 2 of 16 experts, skewed and sticky."""
    layers, experts, shared, blocks = 8, 16, 60, 60
    layer_blocks = shared + experts * blocks
    base = 10_000
    app = Application(
        "moe_routing",
        seed,
        [
            FileRange("/app/engine.idx", 0, 200),
            FileRange("/app/setup.bin", 200, 2000),
            FileRange("/app/experts.gguf", base, base + layers * layer_blocks),
        ],
    )
    hot = app.shuffled(0, 200)
    app.touch(np.arange(2000))
    weights = 1 / np.arange(1, experts + 1) ** 0.8
    weights /= weights.sum()
    placed = [app.random.permutation(experts) for _ in range(layers)]
    chosen = [_route(app, weights) for _ in range(layers)]
    for _ in range(120):
        app.pause(0.1)
        for layer in range(layers):
            if app.random.random() > 0.35:
                chosen[layer] = _route(app, weights)
            start = base + layer * layer_blocks
            app.mixed(np.arange(start, start + shared), hot, 0.02, MAP)
            for expert in sorted(placed[layer][chosen[layer]].tolist()):
                first = start + shared + expert * blocks
                app.touch(np.arange(first, first + blocks), MAP)
    return app.trace(
        f"Mixture of experts: 2 of 16 per layer, popular ones more often, kept with probability 0.35. {INVENTED}"
    )


def _route(app: Application, weights: Doubles) -> Int64s:
    return app.random.choice(len(weights), 2, replace=False, p=weights)


def multi_loop(seed: int = 19) -> Trace:
    """Returns four loops of different periods, interleaved: every turn, every 2nd, 5th and 11th."""
    loops = ((5000, 800, 1), (10_000, 3000, 2), (20_000, 6000, 5), (40_000, 12_000, 11))
    app = Application(
        "multi_loop",
        seed,
        [
            FileRange("/app/engine.idx", 0, 200),
            FileRange("/app/setup.bin", 200, 1500),
            FileRange("/app/draft.gguf", 5000, 5800),
            FileRange("/app/encoder.gguf", 10_000, 13_000),
            FileRange("/app/decoder.gguf", 20_000, 26_000),
            FileRange("/app/vision.gguf", 40_000, 52_000),
        ],
    )
    hot = app.shuffled(0, 200)
    app.touch(np.arange(1500))
    for turn in range(44):
        app.pause(0.2)
        for start, blocks, every in loops:
            if turn % every == every - 1:
                app.mixed(np.arange(start, start + blocks), hot, 0.03)
    return app.trace(f"Four loops: the shorter the loop, the shorter its period. {INVENTED}")
