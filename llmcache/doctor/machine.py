"""Checks of processor, kernel, storage and GPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from llmcache.doctor.check import LIMITED, OK, SKIPPED, Check
from llmcache.errors import LlmcacheError
from llmcache.mount.client.bandwidth import measure
from llmcache.mount.readahead import SMALL_READ_AHEAD_KB, read_ahead_advice, read_ahead_file
from llmcache.units import format_rate

_TORCH_TEST = "import torch; print(torch.cuda.is_available())"
_TORCH_S = 120.0
STEER_STREAMS = 1_300_000_000
"""Bytes per second that mode steer streams on two CPUs, *measured*; storage limits mode inplace."""


def examine(directory: str | None) -> list[Check]:
    """Return the checks; without `directory`, no storage is measured."""
    return [_system(), _storage(directory), *_read_ahead(directory), _gpu()]


def _system() -> Check:
    said = f"Linux {platform.release()}, {platform.machine()}, {os.cpu_count()} processors"
    facts = {"kernel": platform.release(), "machine": platform.machine(), "processors": os.cpu_count()}
    return Check("system", OK, said, facts=facts)


def _storage(directory: str | None) -> Check:
    if directory is None:
        return Check(
            "storage", SKIPPED, "not measured: no directory is given", "llmcache doctor DIR measures it in 10 seconds"
        )
    try:
        found = measure(directory)
    except LlmcacheError as error:
        remedy = "give a directory on a disk where you may write, or one with a file of 64 MiB or more"
        return Check("storage", LIMITED, error.message.removeprefix("--measure: "), remedy, {"directory": directory})
    facts = {"directory": directory, "bandwidth": found.bandwidth, "bytes_read": found.bytes_read, "source": "measured"}
    said = f"{directory}: reads {format_rate(found.bandwidth)} (measured, O_DIRECT)"
    if found.bandwidth > STEER_STREAMS:
        said += f"; mode steer streams at most {format_rate(STEER_STREAMS)}, mode inplace is faster"
    return Check("storage", OK, said, facts=facts)


def _read_ahead(directory: str | None) -> list[Check]:
    path = None if directory is None else read_ahead_file(directory)
    if path is None:
        return []
    kib = int(path.read_text())
    said = f"{directory}: the kernel reads {kib} KiB ahead (read_ahead_kb)"
    facts: dict[str, object] = {"read_ahead_bytes": kib << 10}
    facts["directory"] = directory
    if kib <= SMALL_READ_AHEAD_KB:
        return [Check("read-ahead", OK, said, facts=facts)]
    said += ", also around each page fault on an expert of an MoE model"
    return [Check("read-ahead", LIMITED, said, f"mount MoE models with {read_ahead_advice()}", facts)]


def _gpu() -> Check:
    cards = _nvidia()
    if not cards and os.path.exists("/dev/kfd"):
        cards = ["an AMD GPU (/dev/kfd)"]
    if not cards:
        remedy = "only the gpu tier of llmcache.kv.transformers needs one"
        return Check("GPU", LIMITED, "none: attention is computed on the processor", remedy, {"cards": []})
    usable = _torch_sees_it()
    said, facts = ", ".join(cards), {"cards": cards, "torch": usable}
    if usable:
        return Check("GPU", OK, f"{said}; torch can use it", facts=facts)
    remedy = "install a torch for this GPU: https://pytorch.org/get-started"
    return Check("GPU", LIMITED, f"{said}; torch is not installed or cannot use it", remedy, facts)


def _nvidia() -> list[str]:
    models = []
    for card in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = card.read_text().splitlines()
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return models


def _torch_sees_it() -> bool:
    """Return whether torch can use the GPU. Runs a subprocess, because torch is large and a broken driver may crash it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_TEST], capture_output=True, text=True, timeout=_TORCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.stdout.strip() == "True"
