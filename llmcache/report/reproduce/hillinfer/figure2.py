"""The claims about memory: figure 2 of hillinfer and section 1. All *modelled*: weights, KV cache, activations, runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmcache.kv.planning import MODELS, MemoryUse, memory_use
from llmcache.report.claims import Claim, Finding, Verdict, graded

MODEL = "memory model"
GIB = 1 << 30
CLOSE, NEAR = 0.05, 0.10  # "approximately"
QWEN, LLAMA = "Qwen-7B", "Llama2-13B"
CONTEXT, BATCH = 4096, 8
CONTEXTS = (1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16)
SAID = {QWEN: 30.0, LLAMA: 51.0}  # GB of the paper, at 4 K and 8
GPU_GB, PC_GB = 24, 44


@dataclass(frozen=True)
class Memory:
    """What models take, bytes: `by_context` at a batch of 8, `by_batch` at 4 K, each by model and value."""

    by_context: Mapping[str, Mapping[int, MemoryUse]]
    by_batch: Mapping[str, Mapping[int, MemoryUse]]

    def at(self, model: str) -> MemoryUse:
        """What `model` takes at 4 K and a batch of 8."""
        return self.by_context[model][CONTEXT]


def computed() -> Memory:
    """Returns figure 2: both models at several contexts and batches."""
    models = {name: MODELS[name] for name in SAID}
    return Memory(
        {name: {context: memory_use(model, context, BATCH) for context in CONTEXTS} for name, model in models.items()},
        {name: {batch: memory_use(model, CONTEXT, batch) for batch in BATCHES} for name, model in models.items()},
    )


def _takes(model: str) -> Callable[[Memory, str], Finding]:
    def check(data: Memory, _variant: str) -> Finding:
        use = data.at(model)
        gib, said = use.total / GIB, SAID[model]
        away = gib / said - 1
        ours = (
            f"{gib:.1f} GiB ({use.total / 1e9:.1f} GB of 10^9 bytes): weights {use.weights / GIB:.1f}, "
            f"KV {use.kv / GIB:.1f}; {away:+.1%}"
        )
        verdict = graded(abs(away) <= CLOSE, abs(away) <= NEAR)
        return Finding(verdict, ours, {"total_bytes": use.total, "kv_bytes": use.kv, "difference": away})

    return check


def _exceeds(model: str, limit: int) -> Callable[[Memory, str], Finding]:
    def check(data: Memory, _variant: str) -> Finding:
        gib = data.at(model).total / GIB
        verdict = Verdict.CONFIRMED if gib > limit else Verdict.NOT_CONFIRMED
        return Finding(verdict, f"{gib:.1f} GiB against {limit} GiB", {"total_bytes": data.at(model).total})

    return check


def mostly_kv(data: Memory, _variant: str) -> Finding:
    """Whether the KV cache is most of what Qwen-7B takes."""
    use = data.at(QWEN)
    share = use.kv / use.total
    ours = f"KV is {share:.0%} of {use.total / GIB:.1f} GiB"
    return Finding(graded(share > 0.5, use.kv > use.weights), ours, {"kv_share": share})


def _claim(name: str, quote: str, rule: str, check: Callable[[Memory, str], Finding]) -> Claim[Memory]:
    return Claim(name, "1", quote, rule, check, (MODEL,))


CLAIMS: tuple[Claim[Memory], ...] = (
    _claim(
        "qwen-30-gb",
        "inference with the Qwen-7B model under a 4K context and batch size of 8 consumes approximately 30 GB of memory",
        "within 5 % of 30 GiB; partly: within 10 %",
        _takes(QWEN),
    ),
    _claim(
        "qwen-beyond-the-gpu",
        "surpassing the 24 GB GPU memory capacity of […] the NVIDIA RTX 4090",
        "more than 24 GiB",
        _exceeds(QWEN, GPU_GB),
    ),
    _claim(
        "mostly-kv",
        "with the majority of this overhead attributed to the KV cache",
        "KV takes more than half; partly: more than the weights",
        mostly_kv,
    ),
    _claim(
        "llama-51-gb",
        "inference with the Llama2-13B model on a 4K context requires approximately 51 GB of memory",
        "within 5 % of 51 GiB (batch of 8, as in the figure); partly: within 10 %",
        _takes(LLAMA),
    ),
    _claim(
        "llama-beyond-a-pc",
        "far exceeding the memory limits 44GB of a typical PC",
        "more than 44 GiB",
        _exceeds(LLAMA, PC_GB),
    ),
)
