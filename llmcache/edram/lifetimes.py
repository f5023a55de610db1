"""How long the activations of an attention block lie in eDRAM: baseline order of work, and the Kelle scheduler's.

Source: kelle.txt, section 6, equations 4 to 8, figure 12. All times are modelled. The equations are for MHA and add times
up, whatever the sizes; what refreshing costs is by bytes (`energy`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcache.edram.columns import Configuration
from llmcache.edram.constants import CHIP

Time = TypeVar("Time", float, NDArray[np.float64])


@dataclass(frozen=True)
class Access:
    """What one attention block reads: a weight matrix (S_W, bytes) at a time, cached keys or values (S_KV, bytes)."""

    weight_bytes: float
    kv_bytes: float
    sram_bytes_per_s: float = CHIP.sram_bytes_per_s
    edram_bytes_per_s: float = CHIP.edram_bytes_per_s
    dram_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("weight_bytes", 0), ("kv_bytes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)}, at least {least} is needed")
        for name in ("sram_bytes_per_s", "edram_bytes_per_s", "dram_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: {value}, more than 0 is needed")

    @property
    def edram_ns(self) -> float:
        """T_eDRAM: reading the cached keys, or the values. Source: equation 5."""
        return 1e9 * self.kv_bytes / self.edram_bytes_per_s

    @property
    def sram_ns(self) -> float:
        """T_SRAM: reading one weight matrix. Source: equation 6.

        Differs from the paper if `dram_bytes_per_s` is given: a matrix larger than the SRAM streams through it, no faster
        than DRAM delivers; equation 6 has the bandwidth of SRAM for 16.8 MB in 2 MB.
        """
        rate = min(self.sram_bytes_per_s, self.dram_bytes_per_s or self.sram_bytes_per_s)
        return 1e9 * self.weight_bytes / rate


@dataclass(frozen=True)
class Lifetimes:
    """How long X, Q, K and V lie in eDRAM between being computed and being used, ns, modelled."""

    x_ns: float
    q_ns: float
    k_ns: float
    v_ns: float

    @property
    def total_ns(self) -> float:
        """The sum, L of equations 7 and 8."""
        return self.x_ns + self.q_ns + self.k_ns + self.v_ns


def baseline(access: Access) -> Lifetimes:
    """Returns the lifetimes if Q, K, V and the scores are computed one after the other. Source: equation 7."""
    return Lifetimes(*one_after_the_other(access.sram_ns, access.edram_ns))


def kelle(access: Access) -> Lifetimes:
    """Returns the lifetimes if weights and cached keys are read at the same time. Source: equation 8.

    Keys and values are used as they are computed: the paper takes their lifetimes to be nothing.
    """
    return Lifetimes(*at_the_same_time(access.sram_ns, access.edram_ns))


def access_of(configuration: Configuration) -> Access:
    """Returns what an attention block of the last decode step reads: W_Q as a weight matrix, the keys of the whole batch."""
    shape, workload, hardware = configuration.model, configuration.workload, configuration.hardware
    cached = workload.context + workload.decode
    if configuration.policy.evict:
        cached = min(cached, workload.budget)
    return Access(
        weight_bytes=shape.channels * shape.heads * shape.head_dim * CHIP.weight_bytes,
        kv_bytes=workload.batch * cached * shape.kv_layer_bytes / 2,
        sram_bytes_per_s=hardware.sram_bytes_per_s,
        edram_bytes_per_s=hardware.kv_bytes_per_s,
        dram_bytes_per_s=hardware.dram_bytes_per_s,
    )


def lifetimes_of(configuration: Configuration) -> Lifetimes:
    """Returns the lifetimes in the last decode step of `configuration`, in the order of work of its system."""
    return (kelle if configuration.hardware.overlap else baseline)(access_of(configuration))


def one_after_the_other(sram: Time, edram: Time) -> tuple[Time, Time, Time, Time]:
    """Returns the lifetimes of X, Q, K and V in the baseline, in the unit of T_SRAM and T_eDRAM. Source: equation 7."""
    return 3 * sram, 2 * sram + edram, sram + edram, 2 * edram


def at_the_same_time(sram: Time, edram: Time) -> tuple[Time, Time, Time, Time]:
    """Returns the lifetimes of X, Q, K and V with the Kelle scheduler, in the same way. Source: equation 8."""
    return 3 * sram, sram + edram, 0 * edram, 0 * edram
