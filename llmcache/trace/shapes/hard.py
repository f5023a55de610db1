"""Shapes that a detector of loops gets wrong easily: several readers, noise, repeats, disorder, no order at all."""

from __future__ import annotations

import dataclasses

import numpy as np

from llmcache.trace.record import WRITE, Trace
from llmcache.trace.shapes.on_device import ai_notes
from llmcache.trace.shapes.recording import INVENTED, Recording, Region

_NOISE = (10**6, 10**7)


def interleave(seed: int = 11) -> Trace:
    """Returns two threads that read a model each, in lock step: no two accesses in a row are adjacent."""
    threads = Recording(
        "interleave",
        seed,
        [
            Region("/app/setup.bin", 0, 2000),
            Region("/app/model-a.gguf", 10_000, 16_000),
            Region("/app/model-b.gguf", 30_000, 36_000),
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
    app = Recording(
        "noisy",
        seed,
        [
            Region("/app/engine.idx", 0, 300),
            Region("/app/setup.bin", 300, 3000),
            Region("/app/model.gguf", 10_000, 20_000),
            Region("/app/archive.db", *_NOISE),
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
    app = Recording(
        "page_order",
        seed,
        [
            Region("/app/engine.idx", 0, 200),
            Region("/app/setup.bin", 200, 2000),
            Region("/app/model.gguf", 10_000, 10_000 + layers * blocks),
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
    app = Recording("random", seed, [Region("/app/store.db", 0, 20_000)])
    app.touch((20_000 * app.random.random(200_000) ** 3).astype(np.int64))
    return app.trace(f"Blocks drawn at random, low ones more often. {INVENTED}")


def write_loops(seed: int = 20) -> Trace:
    """Returns a model copied out of its package again and again, read back whole only every third time."""
    app = Recording(
        "write_loops",
        seed,
        [
            Region("/app/engine.idx", 0, 150),
            Region("/app/base.apk", 1000, 5000),
            Region("/app/cache/model.tflite", 6000, 10_000),
            Region("/app/journal.db", 20_000, 20_400),
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
