"""How the paper's experiments can be read: it leaves open what decides about its speed-ups, so several readings are judged.

None is chosen for its result. The first takes the machine as section 4.2 states it. The others put the share of the KV
cache on the SSD that figure 3a speaks of, whatever the memory; two of them take the speed of the SSD from the paper of
the framework that the baselines are built on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmcache.kv.planning import MODELS, PAPER_PC, SYSTEMS, Hardware, Latency, ModelShape, System, Workload, latency
from llmcache.kv.planning.hardware import ASSUMED, Origin
from llmcache.kv.planning.placement import by_ssd_share
from llmcache.kv.planning.workload import KEYS, KEYS_AND_VALUES

BATCH, ALPHA = 8, 0.2  # 4.2: "We set the importance rate α as 0.2 and batch size = 8 in our experiment"
CONTEXTS = (2048, 4096, 8192, 16384, 32768)
FLEXGEN_DISK = 2e9


@dataclass(frozen=True)
class Reading:
    """One way to read section 4.2. `ssd_share`: of the KV cache, for every system; None: what does not fit elsewhere.

    `host_evaluates`, `device_caches` and what is known of where important tokens lie as in `Workload`.
    """

    name: str
    title: str
    text: str
    machine: Hardware
    ssd_share: float | None = None
    host_evaluates: str = KEYS
    device_caches: bool = False
    important_on_ssd: float | None = None
    important_on_ssd_bkp: float | None = None

    def workload(self, context: int) -> Workload:
        """Returns the workload of section 4.2 at `context`."""
        return Workload(
            context,
            BATCH,
            ALPHA,
            host_evaluates=self.host_evaluates,
            device_caches=self.device_caches,
            important_on_ssd=self.important_on_ssd,
            important_on_ssd_bkp=self.important_on_ssd_bkp,
        )

    def latency(self, system: str | System, model: ModelShape, context: int) -> Latency:
        """Returns the modelled latency of `system`, a name or a system."""
        workload = self.workload(context)
        kv_bytes = model.kv_bytes(context, workload.batch)
        places = None if self.ssd_share is None else by_ssd_share(kv_bytes, self.ssd_share)
        return latency(system, self.machine, model, workload, places)


_FLEXGEN_PC = replace(
    PAPER_PC,
    name="paper, FlexGen's disk",
    ssd_bytes_per_s=FLEXGEN_DISK,
    origins=dict(PAPER_PC.origins)
    | {"ssd_bytes_per_s": Origin(ASSUMED, "2 GB/s: what FlexGen's paper (section 6) gives for reading its NVMe SSD")},
)

_SHARES = (
    "the SSD has {share:.0%} of the KV cache, for every system (figure 3a); without in-storage evaluation the KV data is "
    "read to the host for it (3.2), keys and values; the device scores from its DRAM what fits in there (2.2)"
)


def _by_share(name: str, share: float, machine: Hardware = PAPER_PC) -> Reading:
    slower = machine is not PAPER_PC
    title = f"{share:.0%} on the SSD" + (", read at 2 GB/s" if slower else "")
    why = "; the host reads its SSD at 2 GB/s, as FlexGen's paper says of the one it measures with" if slower else ""
    return Reading(name, title, _SHARES.format(share=share) + why, machine, share, KEYS_AND_VALUES, True)


READINGS: dict[str, Reading] = {
    reading.name: reading
    for reading in (
        Reading(
            "sizes",
            "sizes as stated",
            "24 GB and 64 GB of memory; the SSD has what they have no room for; speeds of data sheets; keys are enough to "
            "evaluate; the device reads its flash",
            PAPER_PC,
        ),
        _by_share("share-20", 0.2),
        _by_share("share-30", 0.3),
        _by_share("flexgen-20", 0.2, _FLEXGEN_PC),
        _by_share("flexgen-30", 0.3, _FLEXGEN_PC),
    )
}
"""All readings by name."""

TITLES = {name: reading.title for name, reading in READINGS.items()}
BASELINES = tuple(name for name in SYSTEMS if name != "hillinfer")


@dataclass(frozen=True)
class Point:
    """One model at one context; `latencies` by system, *modelled*."""

    model: str
    context: int
    latencies: dict[str, Latency]

    def speedup(self, baseline: str, output_tokens: int) -> float:
        """How many times as long `baseline` takes as HillInfer, end to end. Source: 4.3, "end-to-end latency"."""
        ends = [self.latencies[name].end_to_end_ns(output_tokens) for name in (baseline, "hillinfer")]
        return ends[0] / ends[1]


def points(reading: Reading) -> list[Point]:
    """Returns the paper's models at every context that each was made for."""
    return [
        Point(model.name, context, {name: reading.latency(name, model, context) for name in SYSTEMS})
        for model in MODELS.values()
        for context in CONTEXTS
        if context <= model.context_limit
    ]
