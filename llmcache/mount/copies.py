"""Detection of inference engines that copy their weights into private memory, where a file cache does not help.

The signs in /proc: private and locked memory, mappings, O_DIRECT and open devices. The flags in the remedies are those of
llama.cpp b11434 (`common/arg.cpp`) and older ones.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from typing import Literal

from llmcache.procfs import mappings, status_of
from llmcache.units import format_size

Cause = Literal["repacking", "no-mmap", "direct-io", "mlock", "gpu"]
WHOLE_SHARE = 0.9
"""A process with private memory of more than this share of the weights counts as having copied them."""
LEAST_BYTES = 64 << 20
_GPU = re.compile(r"/dev/(nvidia[0-9]+|kfd|dri/renderD[0-9]+)")
_REMEDIES: dict[Cause, str] = {
    "repacking": "if the model does not fit in memory, start it with --no-repack or LLAMA_ARG_NO_REPACK=1",
    "no-mmap": "to read the file instead, start it with --load-mode mmap (older: without --no-mmap; Ollama: use_mmap)",
    "direct-io": "to read them through the page cache, start it with --load-mode mmap (older: without --direct-io)",
    "mlock": "if the model does not fit in memory, start it with --load-mode mmap (older: without --mlock)",
    "gpu": "only layers that stay on the CPU gain from steering (-ngl, -ot)",
}


@dataclass(frozen=True)
class ClientFacts:
    """A process that has read a model.

    `private_bytes` may be swapped; `mapped_bytes` are of the model's files; `locked_bytes` by mlock.
    """

    pid: int
    name: str
    private_bytes: int
    mapped_bytes: int
    has_direct: bool = False
    has_gpu: bool = False
    locked_bytes: int = 0


@dataclass(frozen=True)
class Copied:
    """Weights that a process has copied, and why."""

    pid: int
    process: str
    cause: Cause
    copied_bytes: int
    remedy: str = field(init=False)  # the flag of the engine to change

    def __post_init__(self) -> None:
        object.__setattr__(self, "remedy", _REMEDIES[self.cause])

    def said(self) -> str:
        """Return the sentence without the remedy."""
        how = {"repacking": "by repacking", "no-mmap": "without mapping the file", "direct-io": "by direct I/O"}
        if self.cause == "gpu":
            return f"{self.process} ({self.pid}) uses a GPU: it reads the weights that it copies there only once"
        size = format_size(self.copied_bytes)
        if self.cause == "mlock":
            return f"{self.process} ({self.pid}) has locked {size} of memory, so the whole model stays resident"
        return f"{self.process} ({self.pid}) has copied {size} of the weights into private memory {how[self.cause]}"

    def __str__(self) -> str:
        return f"{self.said()}; {self.remedy}"


def find_copy(client: ClientFacts, size_bytes: int, repacked_bytes: int) -> Copied | None:
    """Return the copy that a client has made of a model, or None.

    `repacked_bytes`: of tensors that llama.cpp may repack.
    """
    private = client.private_bytes
    if client.has_direct and private > WHOLE_SHARE * size_bytes:
        return Copied(client.pid, client.name, "direct-io", size_bytes)
    if client.mapped_bytes and client.locked_bytes > WHOLE_SHARE * size_bytes:
        return Copied(client.pid, client.name, "mlock", client.locked_bytes)
    if not client.mapped_bytes and private > WHOLE_SHARE * size_bytes:
        return Copied(client.pid, client.name, "no-mmap", size_bytes)
    if client.mapped_bytes and repacked_bytes >= LEAST_BYTES and private > WHOLE_SHARE * repacked_bytes:
        return Copied(client.pid, client.name, "repacking", repacked_bytes)
    if client.has_gpu and private < WHOLE_SHARE * size_bytes:
        return Copied(client.pid, client.name, "gpu", 0)
    return None


def client_facts(pid: int, files: set[tuple[int, int]]) -> ClientFacts:
    """Return the facts of a process or thread id. OSError: it has ended.

    `files`: (device, inode). Without root, other users' processes count as having them mapped.
    """
    fields = status_of(pid)
    pid = int(fields["Tgid"])
    resident, swapped, locked = (int(fields.get(name, "0").split()[0]) << 10 for name in ("RssAnon", "VmSwap", "VmLck"))
    mapped, has_gpu, is_seen = 0, False, False
    for part in mappings(pid):
        is_seen = True
        if (part.dev, part.inode) in files:
            mapped += part.high - part.low
        has_gpu = has_gpu or bool(_GPU.match(part.path))
    has_direct = False
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                has_gpu = has_gpu or bool(_GPU.match(target))
                has_direct = has_direct or (target.startswith("/") and _is_direct(pid, number))
    private = resident + swapped
    return ClientFacts(pid, fields["Name"], private, mapped if is_seen else 1, has_direct, has_gpu, locked)


def _is_direct(pid: int, number: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{number}", encoding="ascii") as lines:
        flags = next(line for line in lines if line.startswith("flags:"))
    return bool(int(flags.split()[1], 8) & os.O_DIRECT)
