"""Content of a model file: its tensors, the order in which a decoder uses them, their layers and their experts.

The order is derived from tensor names (GGUF and Hugging Face conventions), until the observed one replaces it. A *slice* is
the part of one tensor that belongs to one expert: GGUF (`*_exps`) and fused safetensors stack the experts of a layer in one
tensor. A token uses all slices of an expert.
"""

from __future__ import annotations

import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from llmcache.errors import DataError

_LAYER = re.compile(r"(?:^|\.)(?:blk|layers?|h|blocks?)\.([0-9]{1,9})\.")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:token_embd|per_layer_token_embd|position_embd|token_types"
    r"|embed_tokens|embed_tokens_per_layer|tok_embeddings|word_embeddings|wte|wpe|embed_in)\.weight$"
)
_OUTPUT = re.compile(r"(?:^|\.)(?:output|lm_head|embed_out)\.(?:weight|qweight|bias|scales|qzeros|g_idx)$")
_EXPERT = re.compile(r"_(?:exps|chexps)\.|(?:^|\.)experts\.")

# Steps within a layer, first to last. The first pattern that matches a name determines its step, so specific patterns
# precede general ones. Unknown names go between attention and feed-forward, where architectures add their own tensors.
_IN_LAYER = tuple(
    re.compile(pattern)
    for pattern in (
        r"\.attn_norm|\.input_layernorm|\.attention_norm|\.ln_1\b|\.ln1\b",
        r"\.attn_qkv|\.query_key_value|\.c_attn|\.qkv_proj|\.Wqkv",
        r"\.attn_q_a|\.q_a_",
        r"\.attn_q_b|\.q_b_",
        r"\.attn_q\.|\.q_proj|\.wq\b",
        r"\.attn_q_norm|\.q_norm",
        r"\.attn_kv_a|\.kv_a_",
        r"\.attn_kv_b|\.kv_b_|\.attn_k_b|\.attn_v_b",
        r"\.attn_v\.",  # llama.cpp computes q, v, k (see its scheduler's log); PyTorch models q, k, v
        r"\.attn_k\.|\.k_proj|\.wk\b",
        r"\.attn_k_norm|\.k_norm",
        r"\.v_proj|\.wv\b",
        r"\.attn_sinks|\.sinks",
        r"\.attn_output|\.o_proj|\.wo\b|attn\.c_proj|attention\.dense|attn\.out_proj",
        r"\.post_attention_norm|\.attn_post_norm",
        r"\.ffn_norm|\.post_attention_layernorm|\.pre_feedforward_layernorm|\.ln_2\b|\.ln2\b",
        r"\.ffn_gate_inp|\.exp_probs_b|\.mlp\.gate\.|\.router\b|\.block_sparse_moe\.gate\.",
        r"\.ffn_gate|\.gate_proj|\.gate_up_proj|\.w1\b",
        r"\.ffn_up|\.up_proj|\.w3\b|\.c_fc|\.dense_h_to_4h|\.fc1",
        r"\.ffn_down|\.down_proj|\.w2\b|mlp\.c_proj|\.dense_4h_to_h|\.fc2",
        r"\.post_ffw_norm|\.post_ffn_norm|\.post_feedforward_layernorm|\.layer_out(?:put)?_norm",
    )
)
_UNKNOWN_IN_LAYER = next(place for place, step in enumerate(_IN_LAYER) if "ffn_norm" in step.pattern) - 0.5

_BEFORE_LAYERS, _LAYERS, _AFTER_LAYERS, _LAST = range(4)
_NORM_AFTER = re.compile(r"(?:^|\.)(?:output_norm|norm|ln_f|final_layernorm|final_layer_norm)\.")

OrderKey = tuple[int, int, int, float]


def is_embedding(name: str) -> bool:
    """Return whether `name` is an embedding, of which a token reads only some rows."""
    return _EMBEDDING.search(name) is not None and _LAYER.search(name) is None


def is_output(name: str) -> bool:
    """Return whether `name` is the projection onto the vocabulary."""
    return _OUTPUT.search(name) is not None and _LAYER.search(name) is None


def is_expert(name: str) -> bool:
    """Return whether the tensor `name` belongs to experts."""
    return _EXPERT.search(name) is not None


def compute_key(name: str, tied: bool = False) -> OrderKey:
    """Return the sort key of a tensor: (part of the model, stage, layer, step in the layer).

    With `tied`, the token embedding comes last, because it serves as the output projection.
    """
    part = 0 if re.match(r"(?:enc|v|a|mm|vision_tower|audio_tower|encoder|model\.visual)\.", name) else 1
    layer = _LAYER.search(name)
    if layer is not None:
        steps = (place for place, pattern in enumerate(_IN_LAYER) if pattern.search(name))
        return (part, _LAYERS, int(layer[1]), next(steps, _UNKNOWN_IN_LAYER))
    if is_embedding(name):
        return (part, _LAST if tied else _BEFORE_LAYERS, 0, 0.0)
    if is_output(name):
        return (part, _LAST, 0, 0.0)
    return (part, _AFTER_LAYERS if _NORM_AFTER.search(name) else _BEFORE_LAYERS, 0, 1.0)


Role = Literal["hot", "loop", "rows"]
LONGEST_NAME = 1024  # bytes of a tensor's name or a key: ggml allows 64, and names of PyTorch modules are shorter, too
MOST_TENSORS = 2**16  # of one file: a 4-bit MoE model in one file has 55,000
_NAMES_BYTES = 8 * 2**20  # of all names, as Python strings
_LONGEST_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file; `experts` is the number of expert slices of equal size in it, or 1."""

    name: str
    offset: int
    size_bytes: int
    dtype: str
    experts: int = 1

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes

    @property
    def layer(self) -> str:
        """Return its layer, such as "blk.3" or "model.layers.3"; its own name if it is not part of a layer."""
        layer = _LAYER.search(self.name)
        return self.name if layer is None else self.name[: layer.end() - 1]

    def order(self, tied: bool) -> tuple[OrderKey, int]:
        return compute_key(self.name, tied), self.offset


@dataclass(frozen=True, slots=True)
class Region:
    """A range of a file and how a decoder reads it.

    Roles: hot (often and early: the header), loop (once per token, in this order), rows (a few rows per token: embedding).
    `sparse` marks the experts of an MoE model.
    """

    first_byte: int
    size_bytes: int
    role: Role
    name: str
    sparse: bool = False

    @property
    def end(self) -> int:
        return self.first_byte + self.size_bytes


class Guess(NamedTuple):
    """A guess from a header: extents read page by page, the `hot` ones among them, and the order of all."""

    single: list[int]
    hot: list[int]
    order: list[int]


def first_guess(regions: Iterable[Region], header_bytes: int, extent_bytes: int, count: int, moe: bool) -> Guess:
    """Return the guess for a model file of `count` extents with these `regions`, in the order of computation.

    An extent is single if it is entirely hot, rows or, in an MoE model, sparse.
    """
    single = bytearray(count)
    order: dict[int, None] = {}
    for region in regions:
        order.update(dict.fromkeys(range(region.first_byte // extent_bytes, -(-region.end // extent_bytes))))
        if region.role != "loop" or (region.sparse and moe):
            for extent in range(-(-region.first_byte // extent_bytes), region.end // extent_bytes):
                single[extent] = 1
    singles = [extent for extent in range(count) if single[extent]]
    return Guess(singles, [extent for extent in singles if extent < -(-header_bytes // extent_bytes)], list(order))


# Both families use the same pattern: llama-00001-of-00003.gguf, model-00001-of-00005.safetensors.
_SHARD = re.compile(r".*-(?P<number>[0-9]{5,6})-of-(?P<count>[0-9]{5,6})(?:\.gguf|\.safetensors)", re.DOTALL)


@dataclass(frozen=True)
class ShardName:
    """Shard number (from 0) and number of shards."""

    number: int
    count: int


def shard_name(name: str) -> ShardName | None:
    """Return the shard number and count in the path `name`, or None."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        return None
    return ShardName(number - 1, count)


def shard_names(name: str) -> tuple[str, ...]:
    """Return the names of all shards of the model of `name`; only `name` if it is not a shard."""
    shard = shard_name(name)
    if shard is None:
        return (name,)
    at = name.rindex("-of-")
    digits = at - name.rindex("-", 0, at) - 1
    return tuple(f"{name[: at - digits]}{number:0{digits}d}{name[at:]}" for number in range(1, shard.count + 1))


REPACKED_TYPES = frozenset(("Q4_0", "Q4_K", "IQ4_NL"))
"""GGUF tensor types that llama.cpp, with default settings, repacks: it copies them, rearranged, into its own memory."""


@dataclass(frozen=True)
class ModelLayout:
    """The header of a model file: its length, and the tensors in file order.

    `shard` is (number from 0, count). Padding between tensors belongs to no tensor. `experts_used`: per layer and token.
    """

    kind: Literal["gguf", "safetensors"]
    header_bytes: int
    tensors: tuple[Tensor, ...]
    shard: tuple[int, int] | None = None
    experts_used: int | None = None

    @property
    def repacked_bytes(self) -> int:
        """Return the bytes of the tensors that llama.cpp repacks by default. It does not repack embeddings."""
        tensors = self.tensors if self.kind == "gguf" else ()
        return sum(one.size_bytes for one in tensors if one.dtype in REPACKED_TYPES and not is_embedding(one.name))

    @property
    def has_output(self) -> bool:
        return any(is_output(tensor.name) for tensor in self.tensors)

    def regions(self, tied: bool | None = None) -> tuple[Region, ...]:
        """Return the header and the tensors, in the order a decoder computes.

        `tied`: the token embedding is also the output projection, hence read whole for each token. Default: True if the file
        is a whole model without an output projection.
        """
        if tied is None:
            tied = self.shard is None and not self.has_output
        regions = [Region(0, self.header_bytes, "hot", "header")]
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.order(tied)):
            role: Role = "rows" if is_embedding(tensor.name) and not tied else "loop"
            regions.append(Region(tensor.offset, tensor.size_bytes, role, tensor.name, sparse=is_expert(tensor.name)))
        return tuple(regions)


def quoted(name: str) -> str:
    """Return `name` quoted and shortened for messages: damaged headers have long and unprintable names."""
    return repr(name) if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]!r}…"


def is_text(text: str) -> bool:
    """Return whether `text` can be encoded: JSON may contain escapes of unpaired surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def bounded(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield `tensors`; DataError if their number or the size of their names exceeds the limits."""
    names = 0
    for number, tensor in enumerate(tensors):
        names += sys.getsizeof(tensor.name)
        if number >= MOST_TENSORS or names > _NAMES_BYTES:
            raise DataError(f"the header has more tensors, or longer names, than any model: {number} are read")
        yield tensor


def check_tensors(tensors: Iterable[Tensor], header_bytes: int, file_bytes: int) -> tuple[Tensor, ...]:
    """Return `tensors` in file order; DataError if two overlap or have the same name, or one is outside the data."""
    in_order = tuple(sorted(tensors, key=lambda tensor: (tensor.offset, tensor.size_bytes)))
    names: set[str] = set()
    end, previous = header_bytes, "the header"
    for tensor in in_order:
        if tensor.name in names:
            raise DataError(f"two tensors are called {quoted(tensor.name)}")
        if tensor.offset < end and tensor.size_bytes:
            name = quoted(tensor.name)
            raise DataError(f"tensor {name} at byte {tensor.offset} overlaps {previous}, which ends at {end}")
        if tensor.end > file_bytes:
            raise DataError(
                f"tensor {quoted(tensor.name)} ends at byte {tensor.end}, beyond the end of the file ({file_bytes})",
                "the file is incomplete: copy or download it again",
            )
        names.add(tensor.name)
        if tensor.size_bytes:
            end, previous = tensor.end, quoted(tensor.name)
    return in_order


MOST_SLICES = 1 << 17  # of one file: Kimi K2, one of the largest open models, has 69,120
_NUMBERED = re.compile(r"\.experts\.([0-9]{1,5})\.")


@dataclass(frozen=True)
class SliceRun:
    """`count` adjacent slices of equal size, from `first_byte` on; the first has the number `first`."""

    first_byte: int
    slice_bytes: int
    count: int
    first: int


class Experts:
    """The experts of a file, numbered layer by layer, and their slices, numbered in file order.

    `layers`: (name, first expert, number of experts), in the order of computation. `used`: the experts of a layer that a
    token uses. `slices`: the slice numbers of each expert. `too_many`: more than MOST_SLICES slices, no experts listed.
    """

    def __init__(self, layout: ModelLayout) -> None:
        tensors = [tensor for tensor in layout.tensors if is_expert(tensor.name) and tensor.size_bytes]
        self.too_many = sum(tensor.experts for tensor in tensors) > MOST_SLICES
        slices = [] if self.too_many else sorted(_slices(tensors))
        counts: dict[str, int] = {}
        for _, _, layer, expert in slices:
            counts[layer] = max(counts.get(layer, 0), expert + 1)
        names = sorted(counts, key=_layer_key)
        first = dict(zip(names, accumulate((counts[name] for name in names), initial=0), strict=False))
        self.layers = [(name, first[name], counts[name]) for name in names]
        self.used = layout.experts_used
        self.count = sum(counts.values())
        self.starts = array("Q", (start for start, _, _, _ in slices))
        self.sizes = array("L", (size for _, size, _, _ in slices))
        self.expert_of = array("L", (first[layer] + expert for _, _, layer, expert in slices))
        self.runs = tuple(self._runs())
        self.slices: list[tuple[int, ...]] = [()] * self.count
        for number, expert in enumerate(self.expert_of):
            self.slices[expert] += (number,)

    def _runs(self) -> Iterator[SliceRun]:
        begin = 0
        for number, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            if size != self.sizes[begin] or start != self.starts[begin] + (number - begin) * size:
                yield SliceRun(self.starts[begin], self.sizes[begin], number - begin, begin)
                begin = number
        if self.starts:
            yield SliceRun(self.starts[begin], self.sizes[begin], len(self.starts) - begin, begin)

    @property
    def token_uses(self) -> int:
        return len(self.layers) * (self.used or 0)

    def ranges(self, expert: int) -> list[tuple[int, int]]:
        """Return (offset, size in bytes) of the slices of an expert, in file order."""
        return [(self.starts[number], self.sizes[number]) for number in self.slices[expert]]

    def layer_of(self, expert: int) -> tuple[str, int, int]:
        return self.layers[bisect_right(self.layers, expert, key=lambda layer: layer[1]) - 1]

    def bytes_of(self, expert: int) -> int:
        return sum(self.sizes[number] for number in self.slices[expert])


def _slices(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int, str, int]]:
    """Yield (first byte, size in bytes, layer, expert within the layer) of all slices."""
    for tensor in tensors:
        if numbered := _NUMBERED.search(tensor.name):
            yield tensor.offset, tensor.size_bytes, tensor.layer, int(numbered[1])
        elif tensor.experts > 1:
            size = tensor.size_bytes // tensor.experts
            for expert in range(tensor.experts):
                yield tensor.offset + expert * size, size, tensor.layer, expert


def _layer_key(name: str) -> tuple[int, str]:
    digits = re.findall(r"[0-9]+", name)
    return (int(digits[-1]) if digits else -1, name)


LAYERS_MAX = 512
RUNS_MAX = 1 << 13
NAME_MAX = 80  # characters of a layer's name
HEADER = "header"
OTHERS = "others"


@dataclass(frozen=True)
class Part:
    """One layer: the number of its tensors, and the ranges (first byte, end) of the file that they occupy."""

    name: str
    tensors: int
    stretches: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        return sum(end - first for first, end in self.stretches)


class LayerMap:
    """The layers of one file, in computation order; those beyond LAYERS_MAX or RUNS_MAX become OTHERS."""

    def __init__(self, layout: ModelLayout) -> None:
        in_order = sorted(layout.tensors, key=lambda tensor: tensor.order(tied=False))
        layers = list(dict.fromkeys(tensor.layer for tensor in in_order))
        self._names = [HEADER, *(layer[:NAME_MAX] for layer in layers[: LAYERS_MAX - 1]), OTHERS]
        others = len(self._names) - 1
        numbers = {layer: min(1 + place, others) for place, layer in enumerate(layers)}
        self._tensors = array("L", [0] * len(self._names))
        # Three numbers for each run of adjacent tensors of one layer: layer, first byte, end.
        self._runs = array("L", (0, 0, layout.header_bytes))
        for tensor in layout.tensors:
            number = numbers[tensor.layer] if len(self._runs) < 3 * RUNS_MAX else others
            self._tensors[number] += 1
            if self._runs[-3] == number:
                self._runs[-1] = max(self._runs[-1], tensor.end)
            else:
                self._runs.extend((number, tensor.offset, tensor.end))

    def parts(self) -> Iterator[Part]:
        stretches: list[list[tuple[int, int]]] = [[] for _ in self._names]
        for at in range(0, len(self._runs), 3):
            number, first, end = self._runs[at : at + 3]
            if end > first:
                stretches[number].append((first, end))
        for name, tensors, found in zip(self._names, self._tensors, stretches, strict=True):
            if found:
                yield Part(name, tensors, tuple(found))
