"""What is decoded, and what of a system's behaviour the model cannot know: shares that are parameters, not constants."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

KEYS, KEYS_AND_VALUES = EVALUATES = ("keys", "keys and values")


@dataclass(frozen=True)
class Workload:
    """Decoding `batch` sequences of `context` tokens each, of which the share `alpha` is attended.

    `host_evaluates`: what a system without in-storage evaluation reads from the SSD to judge tokens. Keys are enough; the
    paper speaks of KV data (section 3.2, and figure 3a: "20% (blue) and 30% (red) of full KV cache [...] for token
    evaluations"). `chunk_tokens`: of LeoAM's abstracts, two keys per chunk. `fetch_tokens`: neighbours fetched together.
    `important_on_ssd`: the share of the important tokens that lie on the SSD; None: as of all tokens. With BKP it is
    `important_on_ssd_bkp`; None: BKP finds no locality, its worst case. Both can be measured with `llmcache kv bench`.
    `device_caches`: the device scores the keys that fit in its own memory from there, not from flash.
    """

    context: int
    batch: int = 8
    alpha: float = 0.2
    output_tokens: int = 128
    host_evaluates: str = KEYS
    chunk_tokens: int = 16
    fetch_tokens: int = 1
    important_on_ssd: float | None = None
    important_on_ssd_bkp: float | None = None
    device_caches: bool = False

    def __post_init__(self) -> None:
        for name in ("context", "batch", "output_tokens", "chunk_tokens", "fetch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}, at least 1 is needed")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha: {self.alpha}, more than 0 and at most 1 is needed")
        if self.host_evaluates not in EVALUATES:
            raise ValueError(f"host_evaluates: '{self.host_evaluates}', known are {', '.join(EVALUATES)}")
        for name in ("important_on_ssd", "important_on_ssd_bkp"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}: {value}, a share (0 .. 1) is needed")

    def at(self, context: int) -> Workload:
        """Returns the same at another context."""
        return replace(self, context=context)

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return asdict(self)
