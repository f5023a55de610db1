"""Shows the rows of AERP's layers to a recorder, once a step: how a live run becomes one that can be accounted for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmcache.edram.aerp import AerpLayer
from llmcache.edram.refresh.recorder import RunRecorder


def recorder_for(layer: AerpLayer) -> RunRecorder:
    """Returns a recorder for layers of the shape of `layer`, all vectors of 16 bits."""
    return RunRecorder(2 * layer.shape.head_dim, layer.shape.channels)


def watch(recorder: RunRecorder, layers: Sequence[AerpLayer], sequence: int = 0) -> None:
    """Shows what `layers` of a sequence hold for the step to come, in the groups it will be read in."""
    for number, layer in enumerate(layers):
        hst = layer.high_scores()
        recorder.observe((sequence, number), "kv", np.where(layer.in_kv, layer.slots.positions, -1), hst)
        if layer.inputs is not None:
            recorder.observe((sequence, number), "x", layer.inputs.positions, layer.x_high_scores(hst))
