"""Machines of the latency model: sizes and speeds, with the origin of each number.

Kinds of origins are never mixed: "paper" is a statement of hillinfer.txt, "assumed" is a number that it leaves open
(with a public source), "measured" is a result of `llmcache kv profile` on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from llmcache.units import BLOCK_BYTES

_GB = 10**9
_GIB = 1 << 30
RUNTIME_BYTES = 500 << 20
"""Assumed: a CUDA context with its libraries takes about half a GiB; the paper does not list it separately."""

PAPER, ASSUMED, MEASURED, GIVEN = ORIGINS = ("paper", "assumed", "measured", "given")


class Origin(NamedTuple):
    """The origin of a number: `kind` is one of ORIGINS, `text` names the section, data sheet or measurement."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


Sourced = tuple[float, str, str]  # a number, the kind of its origin (of ORIGINS), and its source


@dataclass(frozen=True)
class Hardware:
    """A machine: bytes, bytes/s, operations/s, ns. Speeds are those that programs reach, unless `origins` names a peak.

    `gpu_link`: host memory to GPU. `score`: keys that the host's processor scores (f_c). `device`: keys that the
    computational SSD scores (f_s), from flash; `device_memory`: from its own DRAM. `ssd`: a plain SSD read by the host.
    `reserved`: for the system. Without a GPU (`gpu_bytes` 0) `gpu_*` speeds are the host's.
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

    @classmethod
    def of(cls, name: str, title: str, **numbers: Sourced) -> Hardware:
        values: dict[str, Any] = {key: value for key, (value, _, _) in numbers.items()}
        origins = {key: Origin(kind, text) for key, (_, kind, text) in numbers.items()}
        return cls(name, title, **values, origins=origins)

    @property
    def has_gpu(self) -> bool:
        return self.gpu_bytes > 0

    def ssd_rate(self, request_bytes: float) -> float:
        """Return the useful bytes/s of scattered SSD reads: whole blocks, limited by requests/s."""
        blocks_bytes = -(-request_bytes // BLOCK_BYTES) * BLOCK_BYTES
        return min(self.ssd_bytes_per_s * request_bytes / blocks_bytes, self.ssd_requests_per_s * request_bytes)

    def device_score_rate(self, keys_bytes: float, cached: bool) -> float:
        """Return the bytes/s at which the device scores keys; `cached`: its memory caches those that fit.

        Source: hillinfer.txt, section 2.2: "The on-board DRAM acts as a cache for NAND flash".
        """
        kept = min(1.0, self.device_memory_bytes / keys_bytes) if cached and keys_bytes else float(cached)
        return 1 / (kept / self.device_memory_bytes_per_s + (1 - kept) / self.device_bytes_per_s)

    def with_sizes(self, gpu_bytes: int | None = None, host_bytes: int | None = None) -> Hardware:
        """Return it with the given memory sizes. Without a GPU the host computes."""
        given = {"gpu_bytes": gpu_bytes, "host_bytes": host_bytes}
        changes: dict[str, Sourced] = {
            name: (size, GIVEN, "on the command line") for name, size in given.items() if size is not None
        }
        if gpu_bytes == 0 and self.has_gpu:
            speed = (self.host_bytes_per_s, *self.origins["host_bytes_per_s"])
            changes |= {"gpu_bytes_per_s": speed, "gpu_link_bytes_per_s": speed, "gpu_flops": _PROCESSORS[self.name]}
            changes["gpu_reserved_bytes"] = (0, ASSUMED, "there is no GPU")
        return self.with_numbers(**changes)

    def with_gpu(self, gpu_bytes: int, like: Hardware) -> Hardware:
        """Return it with a GPU of `gpu_bytes`, whose speeds are assumed to be those of the machine `like`."""
        names = ("gpu_bytes_per_s", "gpu_flops", "gpu_link_bytes_per_s", "gpu_reserved_bytes")
        text = f"those of the {like.name} PC, "
        speeds = {name: (getattr(like, name), ASSUMED, text + like.origins[name].text) for name in names}
        return self.with_sizes(gpu_bytes=gpu_bytes).with_numbers(**speeds)

    def with_numbers(self, **numbers: Sourced) -> Hardware:
        known: dict[str, Sourced] = {name: (getattr(self, name), *origin) for name, origin in self.origins.items()}
        return Hardware.of(self.name, self.title, **known | numbers)

    def faster(self, **factors: float) -> Hardware:
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})

    def to_json(self) -> dict[str, Any]:
        numbers = {
            name: {"value": getattr(self, name), "origin": self.origins[name].kind, "source": self.origins[name].text}
            for name in NUMBERS
        }
        return {"name": self.name, "title": self.title, **numbers}


NUMBERS = tuple(one.name for one in fields(Hardware) if one.name not in ("name", "title", "origins"))
"""The fields of Hardware that are numbers."""


# Shares of the peaks on data sheets that programs reach. Assumed: the paper gives none.
_GPU_MEMORY = 0.80  # streaming kernels reach 75-90 % of GDDR6X peaks
_GPU_COMPUTE = 0.50  # large half-precision products outside benchmarks
_HOST_COMPUTE = 0.50  # the same in single precision, all cores
_HOST_MEMORY = 0.75  # all cores, of the channels' peak; STREAM reaches 75-85 %
_SCORING = 0.85  # of memory bandwidth: measured for the kernels here (tools/bench kvbench: 0.86)

_PROCESSORS: dict[str, Sourced] = {
    "paper": (
        _HOST_COMPUTE * 36 * 2.1e9 * 64, ASSUMED,
        f"Xeon 8352V: 36 cores at 2.1 GHz, 64 operations a cycle (AVX-512), {_HOST_COMPUTE:.0%} of it"
    ),
    "typical": (
        _HOST_COMPUTE * 8 * 4e9 * 32, ASSUMED, f"8 cores at 4 GHz, 32 operations a cycle (AVX2), {_HOST_COMPUTE:.0%} of it"
    ),
}  # fmt: skip
"""Operations/s of the processors of machines with a GPU."""

_8352V = 8 * 8 * 2.933 * _GB  # peak of eight channels of DDR4-2933

PAPER_PC = Hardware.of(
    "paper",
    "the paper's machine (RTX 4090, Xeon 8352V, SmartSSD)",
    gpu_bytes=(24 * _GIB, PAPER, "4.2: '24 GB of GPU memory'"),
    gpu_bytes_per_s=(_GPU_MEMORY * 1008 * _GB, ASSUMED, f"RTX 4090: 1008 GB/s by its data sheet, {_GPU_MEMORY:.0%} of it"),
    gpu_flops=(_GPU_COMPUTE * 165e12, ASSUMED, f"RTX 4090: 165 TFLOPS dense half precision, {_GPU_COMPUTE:.0%} of it"),
    gpu_link_bytes_per_s=(
        25 * _GB, ASSUMED, "PCIe 4.0 x16 carries 31.5 GB/s raw, copies from pinned memory get about 25"
    ),
    gpu_reserved_bytes=(RUNTIME_BYTES, ASSUMED, "a CUDA context with its libraries takes about half a GiB"),
    host_bytes=(64 * _GIB, PAPER, "4.2: '64 GB of host memory'"),
    host_bytes_per_s=(
        _HOST_MEMORY * _8352V, ASSUMED,
        f"Xeon 8352V: 8 channels of DDR4-2933, 188 GB/s if all are used, {_HOST_MEMORY:.0%} of it"
    ),
    host_reserved_bytes=(4 * _GIB, ASSUMED, "system, Python and staging buffers: 4 GiB"),
    score_bytes_per_s=(
        _SCORING * _HOST_MEMORY * _8352V, ASSUMED, f"{_SCORING:.0%} of the host's memory bandwidth, as the kernels reach"
    ),
    ssd_bytes_per_s=(
        7 * _GB, ASSUMED, "7 GB/s, as advertised for NVMe drives on PCIe 4.0 x4; the paper: 'a 300 GB Intel SSD'"
    ),
    ssd_requests_per_s=(900_000, ASSUMED, "data centre NVMe on PCIe 4.0: about 900,000 reads of 4 KiB a second"),
    device_bytes_per_s=(
        4 * _GB, PAPER, "4.2: 'a peak bandwidth of approximately 4 GB/s'; the engine is assumed to keep up"
    ),
    device_memory_bytes=(4 * _GB, PAPER, "4.2: '4 GB DDR4'"),
    device_memory_bytes_per_s=(19.2 * _GB, ASSUMED, "one channel of DDR4-2400: 19.2 GB/s"),
    device_link_bytes_per_s=(3.5 * _GB, ASSUMED, "the SmartSSD uses PCIe 3.0 x4, which carries 3.5 GB/s of data"),
    device_latency_ns=(60_000, ASSUMED, "60 us per command through the Xilinx runtime"),
)  # fmt: skip
"""Source: hillinfer.txt, section 4.2, "Hardware"."""

TYPICAL_PC = replace(
    PAPER_PC, name="typical", title="the paper's typical PC (RTX 3080, 32 GB), with a SmartSSD"
).with_numbers(
    gpu_bytes=(12 * _GIB, PAPER, "1: 'a 12 GB commodity GPU (RTX 3080)'"),
    gpu_bytes_per_s=(
        _GPU_MEMORY * 912 * _GB, ASSUMED, f"RTX 3080 12 GB: 912 GB/s by its data sheet, {_GPU_MEMORY:.0%} of it"
    ),
    gpu_flops=(_GPU_COMPUTE * 61e12, ASSUMED, f"RTX 3080 12 GB: 61 TFLOPS dense half precision, {_GPU_COMPUTE:.0%} of it"),
    host_bytes=(32 * _GIB, PAPER, "1: '32 GB CPU memory'"),
    host_bytes_per_s=(_HOST_MEMORY * 51.2 * _GB, ASSUMED, f"two channels of DDR4-3200: 51.2 GB/s, {_HOST_MEMORY:.0%} of it"),
    score_bytes_per_s=(_SCORING * _HOST_MEMORY * 51.2 * _GB, ASSUMED, PAPER_PC.origins["score_bytes_per_s"].text),
)  # fmt: skip
"""Source: hillinfer.txt, section 1; links, storage and device are those of `PAPER_PC`, the rest a desktop of that time."""

MACHINES: dict[str, Hardware] = {machine.name: machine for machine in (PAPER_PC, TYPICAL_PC)}
"""Machines by name; "measured" is created from a profile, see `profile.hardware_of`."""
