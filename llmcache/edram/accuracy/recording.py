"""Records what AERP keeps of a real model's text, step by step, for the refresh accounting."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from llmcache.edram.accuracy.decoder import Decoder
from llmcache.edram.accuracy.evaluation import Asked
from llmcache.edram.aerp import AerpSettings
from llmcache.edram.flips import CellSettings
from llmcache.edram.refresh import EdramRun
from llmcache.edram.refresh.watching import recorder_for, watch
from llmcache.units import format_duration


def record_run(
    decoder: Decoder, asked: Asked, settings: AerpSettings, cells: CellSettings, *, step_ns: float | None = None
) -> EdramRun:
    """Returns what lies in eDRAM while `asked` is answered, all sequences at a time, a step per token.

    `step_ns`: of a step on the *modelled* accelerator; None: whoever reads the run says.
    """
    prompts = [decoder.prompt(ids)[0] for ids in asked.ids]
    caches = [decoder.cache(prompt, settings, replace(cells, seed=place)) for place, prompt in enumerate(prompts)]
    recorder = recorder_for(caches[0][0])
    tokens = np.stack([asked.asked, asked.answers], axis=2).reshape(len(caches), -1)
    for step in tokens.T:
        for sequence, (token, cache) in enumerate(zip(step.tolist(), caches, strict=True)):
            watch(recorder, cache, sequence)
            decoder.step(token, cache)
        recorder.end_step(step_ns)
    clock = "not said" if step_ns is None else f"modelled: {format_duration(step_ns)} a step"
    title = f"AERP, {len(caches)} texts of {asked.ids.shape[1]} tokens"
    return recorder.finish(title, clock, {"policy": "aerp", **asdict(settings), "format": cells.format})
