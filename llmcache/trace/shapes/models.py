"""Shapes of model inference: a change of models, prefill and decode, mixture of experts, loops of several periods."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcache.trace.record import MAP, Trace
from llmcache.trace.shapes.recording import INVENTED, Recording, Region


def model_switch(seed: int = 14) -> Trace:
    """Returns model A read in a loop, then B, then A again, then C: old loops must be forgotten, and found again."""
    models = ((10_000, 4000, 12), (30_000, 9000, 12), (10_000, 4000, 8), (50_000, 6000, 12))
    app = Recording(
        "model_switch",
        seed,
        [
            Region("/app/engine.idx", 0, 200),
            Region("/app/setup.bin", 200, 3000),
            Region("/app/model-a.gguf", 9500, 14_000),
            Region("/app/model-b.gguf", 29_500, 39_000),
            Region("/app/model-c.gguf", 49_500, 56_000),
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
    app = Recording(
        "prefill_decode",
        seed,
        [
            Region("/app/engine.idx", 0, 200),
            Region("/app/setup.bin", 200, 3000),
            Region("/app/embedding.bin", 5000, 7000),
            Region("/app/model.gguf", base, base + layers * blocks),
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
    app = Recording(
        "moe_routing",
        seed,
        [
            Region("/app/engine.idx", 0, 200),
            Region("/app/setup.bin", 200, 2000),
            Region("/app/experts.gguf", base, base + layers * layer_blocks),
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


def _route(app: Recording, weights: NDArray[np.float64]) -> NDArray[np.int64]:
    return app.random.choice(len(weights), 2, replace=False, p=weights)


def multi_loop(seed: int = 19) -> Trace:
    """Returns four loops of different periods, interleaved: every turn, every 2nd, 5th and 11th."""
    loops = ((5000, 800, 1), (10_000, 3000, 2), (20_000, 6000, 5), (40_000, 12_000, 11))
    app = Recording(
        "multi_loop",
        seed,
        [
            Region("/app/engine.idx", 0, 200),
            Region("/app/setup.bin", 200, 1500),
            Region("/app/draft.gguf", 5000, 5800),
            Region("/app/encoder.gguf", 10_000, 13_000),
            Region("/app/decoder.gguf", 20_000, 26_000),
            Region("/app/vision.gguf", 40_000, 52_000),
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
