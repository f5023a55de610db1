"""Machines as the latency model sees them: sizes and speeds, and beside each number where it comes from.

Three origins, never mixed: "paper" is what hillinfer.txt says, "assumed" is what it leaves open (with a public source),
"measured" is what `llmcache kv profile` found on this machine. All assumptions about the paper's machine stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from llmcache.kv.planning.memory import RUNTIME_BYTES
from llmcache.units import BLOCK_BYTES

_GB = 10**9
_GIB = 1 << 30

PAPER, ASSUMED, MEASURED, GIVEN = ORIGINS = ("paper", "assumed", "measured", "given")


@dataclass(frozen=True)
class Origin:
    """Where a number comes from: `kind` is one of ORIGINS, `text` says which section, data sheet or measurement."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Hardware:
    """A machine: bytes, bytes/s, operations/s, ns. Speeds are what programs get, not peaks, unless `origins` says so.

    `gpu_link`: host memory to GPU. `score`: keys that the host's processor scores (f_c). `device`: keys that the
    computational SSD scores (f_s), from flash; `device_memory`: from its own DRAM. `ssd`: a plain SSD read by the host.
    `reserved`: for the system, not for models.
    Without a GPU (`gpu_bytes` 0) the host computes: `gpu_*` speeds are the host's, and nothing crosses to a GPU.
    """

    name: str
    title: str
    gpu_bytes: int
    gpu_bytes_per_s: float
    gpu_flops: float
    gpu_link_bytes_per_s: float
    gpu_reserved_bytes: int
    host_bytes: int
    host_bytes_per_s: float
    host_reserved_bytes: int
    score_bytes_per_s: float
    ssd_bytes_per_s: float
    ssd_requests_per_s: float
    device_bytes_per_s: float
    device_memory_bytes: int
    device_memory_bytes_per_s: float
    device_link_bytes_per_s: float
    device_latency_ns: float
    origins: Mapping[str, Origin]

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name.endswith(("_per_s", "_flops")) and not value > 0:
                raise ValueError(f"{one.name}: {value}, more than 0 is needed")
            if one.name.endswith(("_bytes", "_ns")) and value < 0:
                raise ValueError(f"{one.name}: {value}, at least 0 is needed")
        if set(self.origins) != set(NUMBERS):
            raise ValueError(f"origins: {sorted(set(self.origins) ^ set(NUMBERS))} are missing or unknown")

    @property
    def has_gpu(self) -> bool:
        """True if there is memory of a GPU beside the host's."""
        return self.gpu_bytes > 0

    def ssd_rate(self, request_bytes: float) -> float:
        """Bytes/s of use that scattered reads of `request_bytes` get from the SSD: whole blocks, so many a second."""
        blocks_bytes = -(-request_bytes // BLOCK_BYTES) * BLOCK_BYTES
        return min(self.ssd_bytes_per_s * request_bytes / blocks_bytes, self.ssd_requests_per_s * request_bytes)

    def device_score_rate(self, keys_bytes: float, cached: bool) -> float:
        """Bytes/s at which the device scores `keys_bytes` of keys; `cached`: its own memory keeps what fits of them.

        Source: hillinfer.txt, section 2.2: "The on-board DRAM acts as a cache for NAND flash".
        """
        kept = min(1.0, self.device_memory_bytes / keys_bytes) if cached and keys_bytes else float(cached)
        return 1 / (kept / self.device_memory_bytes_per_s + (1 - kept) / self.device_bytes_per_s)

    def with_sizes(self, gpu_bytes: int | None = None, host_bytes: int | None = None) -> Hardware:
        """Returns it with memory of other sizes (None: as it is), which then are given."""
        sizes = {"gpu_bytes": gpu_bytes, "host_bytes": host_bytes}
        given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
        origins = dict(self.origins) | {name: Origin(GIVEN, "on the command line") for name in given}
        return replace(self, origins=origins, **given)

    def faster(self, **factors: float) -> Hardware:
        """Returns it with speeds multiplied, for what-if questions: faster(ssd_bytes_per_s=2)."""
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data: each number with its origin."""
        plain = asdict(self)
        numbers = {
            name: {"value": plain[name], "origin": self.origins[name].kind, "source": self.origins[name].text}
            for name in NUMBERS
        }
        return {"name": self.name, "title": self.title, **numbers}


NUMBERS = tuple(one.name for one in fields(Hardware) if one.name not in ("name", "title", "origins"))
"""The fields of Hardware that are numbers."""


@dataclass(frozen=True)
class Efficiency:
    """What programs get of the peaks on data sheets. Assumed: the paper gives none. One place for all machines."""

    gpu_memory: float = 0.80  # streaming kernels reach 75-90 % of GDDR6X peaks
    gpu_compute: float = 0.50  # large half-precision products outside benchmarks
    host_memory: float = 0.75  # all cores, of the channels' peak; STREAM reaches 75-85 %
    scoring: float = 0.85  # of what reading memory gives: measured for the kernels here (tools/bench kvbench: 0.86)


EFFICIENCY = Efficiency()

_PCIE4_X16 = 25 * _GB  # of 31.5 raw; what NVIDIA's bandwidthTest shows with pinned memory
_8352V_PEAK = 8 * 8 * 2.933 * _GB  # eight channels of DDR4-2933

PAPER_PC = Hardware(
    name="paper",
    title="the paper's machine (RTX 4090, Xeon 8352V, SmartSSD)",
    gpu_bytes=24 * _GIB,
    gpu_bytes_per_s=EFFICIENCY.gpu_memory * 1008 * _GB,
    gpu_flops=EFFICIENCY.gpu_compute * 165e12,
    gpu_link_bytes_per_s=_PCIE4_X16,
    gpu_reserved_bytes=RUNTIME_BYTES,
    host_bytes=64 * _GIB,
    host_bytes_per_s=EFFICIENCY.host_memory * _8352V_PEAK,
    host_reserved_bytes=4 * _GIB,
    score_bytes_per_s=EFFICIENCY.scoring * EFFICIENCY.host_memory * _8352V_PEAK,
    ssd_bytes_per_s=7 * _GB,
    ssd_requests_per_s=900_000,
    device_bytes_per_s=4 * _GB,
    device_memory_bytes=4 * _GB,
    device_memory_bytes_per_s=19.2 * _GB,
    device_link_bytes_per_s=3.5 * _GB,
    device_latency_ns=60_000,
    origins={
        "gpu_bytes": Origin(PAPER, "4.2: '24 GB of GPU memory'"),
        "gpu_bytes_per_s": Origin(ASSUMED, f"RTX 4090: 1008 GB/s by its data sheet, {EFFICIENCY.gpu_memory:.0%} of it"),
        "gpu_flops": Origin(ASSUMED, f"RTX 4090: 165 TFLOPS dense half precision, {EFFICIENCY.gpu_compute:.0%} of it"),
        "gpu_link_bytes_per_s": Origin(
            ASSUMED, "PCIe 4.0 x16 carries 31.5 GB/s raw, copies from pinned memory get about 25"
        ),
        "gpu_reserved_bytes": Origin(ASSUMED, "a CUDA context with its libraries takes about half a GiB"),
        "host_bytes": Origin(PAPER, "4.2: '64 GB of host memory'"),
        "host_bytes_per_s": Origin(
            ASSUMED, f"Xeon 8352V: 8 channels of DDR4-2933, 188 GB/s if all are used, {EFFICIENCY.host_memory:.0%} of it"
        ),
        "host_reserved_bytes": Origin(ASSUMED, "system, Python and staging buffers: 4 GiB"),
        "score_bytes_per_s": Origin(ASSUMED, f"{EFFICIENCY.scoring:.0%} of the host's memory, as the kernels here reach"),
        "ssd_bytes_per_s": Origin(
            ASSUMED, "7 GB/s: what NVMe drives on PCIe 4.0 x4 are sold with; the paper: 'a 300 GB Intel SSD'"
        ),
        "ssd_requests_per_s": Origin(ASSUMED, "data centre NVMe on PCIe 4.0: about 900,000 reads of 4 KiB a second"),
        "device_bytes_per_s": Origin(
            PAPER, "4.2: 'a peak bandwidth of approximately 4 GB/s'; the engine is taken to keep up with it"
        ),
        "device_memory_bytes": Origin(PAPER, "4.2: '4 GB DDR4'"),
        "device_memory_bytes_per_s": Origin(ASSUMED, "one channel of DDR4-2400: 19.2 GB/s"),
        "device_link_bytes_per_s": Origin(ASSUMED, "SmartSSD is on PCIe 3.0 x4, which carries 3.5 GB/s of data"),
        "device_latency_ns": Origin(ASSUMED, "60 us per command through the Xilinx runtime"),
    },
)
"""Source: hillinfer.txt, section 4.2, "Hardware"."""

TYPICAL_PC = replace(
    PAPER_PC,
    name="typical",
    title="the paper's typical PC (RTX 3080, 32 GB), with a SmartSSD",
    gpu_bytes=12 * _GIB,
    gpu_bytes_per_s=EFFICIENCY.gpu_memory * 912 * _GB,
    gpu_flops=EFFICIENCY.gpu_compute * 61e12,
    host_bytes=32 * _GIB,
    host_bytes_per_s=EFFICIENCY.host_memory * 51.2 * _GB,
    score_bytes_per_s=EFFICIENCY.scoring * EFFICIENCY.host_memory * 51.2 * _GB,
    origins={
        **PAPER_PC.origins,
        "gpu_bytes": Origin(PAPER, "1: 'a 12 GB commodity GPU (RTX 3080)'"),
        "gpu_bytes_per_s": Origin(ASSUMED, f"RTX 3080 12 GB: 912 GB/s by its data sheet, {EFFICIENCY.gpu_memory:.0%} of it"),
        "gpu_flops": Origin(ASSUMED, f"RTX 3080 12 GB: 61 TFLOPS dense half precision, {EFFICIENCY.gpu_compute:.0%} of it"),
        "host_bytes": Origin(PAPER, "1: '32 GB CPU memory'"),
        "host_bytes_per_s": Origin(ASSUMED, f"two channels of DDR4-3200: 51.2 GB/s, {EFFICIENCY.host_memory:.0%} of it"),
    },
)
"""Source: hillinfer.txt, section 1; links, storage and device are those of `PAPER_PC`, the rest a desktop of that time."""

MACHINES: dict[str, Hardware] = {machine.name: machine for machine in (PAPER_PC, TYPICAL_PC)}
"""Machines that can be named; "measured" is made from a profile, see `machine.hardware_of`."""
