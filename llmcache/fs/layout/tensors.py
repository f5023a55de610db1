"""What a model file holds: tensors, the order in which a decoder uses them, and which bytes belong to which layer.

The order is told from names (GGUF and Hugging Face conventions). It is a first guess: the order of the accesses really
observed overrules it. Layers (`Anatomy`) are kept for every file that is open, and so are small: the header is the first
one; a file of more than LAYERS_MAX of them (names of no known convention) has its later ones, in the order of computation,
under one name; so has one of more than RUNS_MAX runs of tensors of one layer those behind.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from llmcache.errors import DataError

_LAYER = re.compile(r"(?:^|\.)(?:blk|layers?|h|blocks?)\.([0-9]{1,9})\.")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:token_embd|per_layer_token_embd|position_embd|token_types"
    r"|embed_tokens|embed_tokens_per_layer|tok_embeddings|word_embeddings|wte|wpe|embed_in)\.weight$"
)
_OUTPUT = re.compile(r"(?:^|\.)(?:output|lm_head|embed_out)\.(?:weight|qweight|bias|scales|qzeros|g_idx)$")
_EXPERT = re.compile(r"_(?:exps|chexps)\.|(?:^|\.)experts\.")

# Inside a layer, first to last. A name takes the place of the first pattern found in it, so the special ones of each
# step (norms of q and k, shared experts) stand before the general one. Unknown names go between attention and
# feed-forward, which is where architectures put their own inventions.
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
        r"\.attn_v\.",  # llama.cpp's graph has q, v, k (as its scheduler's log shows); PyTorch models q, k, v
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
    """Whether a token reads only some rows of the tensor called `name`."""
    return _EMBEDDING.search(name) is not None and _LAYER.search(name) is None


def is_output(name: str) -> bool:
    """Whether the tensor called `name` is the projection onto the vocabulary."""
    return _OUTPUT.search(name) is not None and _LAYER.search(name) is None


def is_expert(name: str) -> bool:
    """Whether the tensor called `name` belongs to experts, of which a token uses a few."""
    return _EXPERT.search(name) is not None


def layer_name(name: str) -> str:
    """The layer that the tensor called `name` is part of: "blk.3", "model.layers.3"; its own name if it is in none."""
    layer = _LAYER.search(name)
    return name if layer is None else name[: layer.end() - 1]


def compute_key(name: str, tied: bool = False) -> OrderKey:
    """Sort key of the tensor called `name`: (part of the model, stage, layer, step in the layer).

    With `tied` the token embedding stands last, where it serves as the output projection.
    """
    part = 0 if re.match(r"(?:enc|v|a|mm|vision_tower|audio_tower|encoder|model\.visual)\.", name) else 1
    layer = _LAYER.search(name)
    if layer is not None:
        return (part, _LAYERS, int(layer[1]), _step(name))
    if is_embedding(name):
        return (part, _LAST if tied else _BEFORE_LAYERS, 0, 0.0)
    if is_output(name):
        return (part, _LAST, 0, 0.0)
    return (part, _AFTER_LAYERS if _NORM_AFTER.search(name) else _BEFORE_LAYERS, 0, 1.0)


def _step(name: str) -> float:
    for place, pattern in enumerate(_IN_LAYER):
        if pattern.search(name):
            return place
    return _UNKNOWN_IN_LAYER


Role = Literal["hot", "loop", "rows"]
LONGEST_NAME = 1024  # bytes of a tensor's name or a key: ggml allows 64, and modules of Python are not nested so deep
MOST_TENSORS = 2**16  # of one file: a mixture of experts in four bits, unsharded, has 55 000
_NAMES_BYTES = 8 * 2**20  # of all names as Python keeps them
_LONGEST_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: `size_bytes` bytes at `offset` (from the start of the file).

    `experts`: of a mixture, whose slices of equal size lie in it one behind the other; 1 otherwise.
    """

    name: str
    offset: int
    size_bytes: int
    dtype: str
    experts: int = 1

    @property
    def end(self) -> int:
        """The first byte behind the tensor."""
        return self.offset + self.size_bytes

    @property
    def layer(self) -> str:
        """The layer that it is part of; its own name if it is in none."""
        return layer_name(self.name)


@dataclass(frozen=True, slots=True)
class Region:
    """A range of a file and how a decoder reads it.

    hot: often and early (the header) · loop: once per token, in this order · rows: a few rows per token (embedding).
    `sparse` marks tensors of which a token needs only a part (experts of a mixture).
    """

    first_byte: int
    size_bytes: int
    role: Role
    name: str
    sparse: bool = False

    @property
    def end(self) -> int:
        """The first byte behind the region."""
        return self.first_byte + self.size_bytes


# Both families use the same pattern: llama-00001-of-00003.gguf, model-00001-of-00005.safetensors.
_SHARD = re.compile(r".*-(?P<number>[0-9]{5,6})-of-(?P<count>[0-9]{5,6})(?:\.gguf|\.safetensors)", re.DOTALL)


@dataclass(frozen=True)
class ShardName:
    """What the name of a shard says: which of how many; `number` counts from 0."""

    number: int
    count: int


def shard_name(name: str) -> ShardName | None:
    """The shard that the file called `name` (with or without directories) is; None for a file on its own."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        return None
    return ShardName(number - 1, count)


@dataclass(frozen=True)
class ModelLayout:
    """The header of a model file: its length, and the tensors in file order.

    `shard` is (number from 0, count) where the file is one shard of several. Padding between tensors is part of none.
    `experts_used`: of each layer's, by a token, where the header says it.
    """

    kind: Literal["gguf", "safetensors"]
    header_bytes: int
    tensors: tuple[Tensor, ...]
    shard: tuple[int, int] | None = None
    experts_used: int | None = None

    @property
    def has_output(self) -> bool:
        """Whether this file holds an output projection of its own."""
        return any(is_output(tensor.name) for tensor in self.tensors)

    def regions(self, tied: bool | None = None) -> tuple[Region, ...]:
        """Header and tensors in the order a decoder computes.

        `tied`: the token embedding is the output projection too, hence read whole for each token. By default it is
        when a file that is a model of its own has no output; a lone shard cannot tell and counts as not tied.
        """
        if tied is None:
            tied = self.shard is None and not self.has_output
        in_order = sorted(self.tensors, key=lambda tensor: order_key(tensor, tied))
        header = Region(0, self.header_bytes, "hot", "header")
        return (header, *(region_of(tensor, tied) for tensor in in_order))


def order_key(tensor: Tensor, tied: bool) -> tuple[OrderKey, int]:
    """Sort key of `tensor` in the order a decoder computes; what the names leave open goes by place in the file."""
    return compute_key(tensor.name, tied), tensor.offset


def region_of(tensor: Tensor, tied: bool) -> Region:
    """The region that `tensor` occupies."""
    role: Role = "rows" if is_embedding(tensor.name) and not tied else "loop"
    return Region(tensor.offset, tensor.size_bytes, role, tensor.name, sparse=is_expert(tensor.name))


def quoted(name: str) -> str:
    """`name` as messages show it: damaged headers have names of any length, and of characters that cannot be printed."""
    return repr(name) if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]!r}…"


def is_text(text: str) -> bool:
    """Whether `text` can be printed: JSON may escape a surrogate that stands alone."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def bounded(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields `tensors`; DataError once there are more of them, or longer names, than the memory of a mount has room for."""
    names = 0
    for number, tensor in enumerate(tensors):
        names += sys.getsizeof(tensor.name)
        if number >= MOST_TENSORS or names > _NAMES_BYTES:
            raise DataError(f"more tensors, or longer names of them, than any model has: {number} are read")
        yield tensor


def check_tensors(tensors: Iterable[Tensor], header_bytes: int, file_bytes: int) -> tuple[Tensor, ...]:
    """`tensors` in file order; DataError when one lies outside the data, overlaps another or has its name."""
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
                f"tensor {quoted(tensor.name)} ends at byte {tensor.end}, behind the end of the file ({file_bytes})",
                "the file is incomplete: copy or download it again",
            )
        names.add(tensor.name)
        if tensor.size_bytes:
            end, previous = tensor.end, quoted(tensor.name)
    return in_order


LAYERS_MAX = 512
RUNS_MAX = 1 << 13
NAME_MAX = 80  # characters of a layer's name
HEADER = "header"
OTHERS = "others"


@dataclass(frozen=True)
class Part:
    """One layer: its tensors' number, and their bytes as stretches (first, end) of the file."""

    name: str
    tensors: int
    stretches: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all stretches."""
        return sum(end - first for first, end in self.stretches)


class Anatomy:
    """The layers of one file, in the order in which a decoder computes them."""

    def __init__(self, layout: ModelLayout) -> None:
        in_order = sorted(layout.tensors, key=lambda tensor: (compute_key(tensor.name), tensor.offset))
        layers = list(dict.fromkeys(tensor.layer for tensor in in_order))
        self._names = [HEADER, *(layer[:NAME_MAX] for layer in layers[: LAYERS_MAX - 1]), OTHERS]
        others = len(self._names) - 1
        numbers = {layer: min(1 + place, others) for place, layer in enumerate(layers)}
        self._tensors = array("L", [0] * len(self._names))
        # Runs of tensors of one layer: its number, first byte, end; three numbers a run.
        self._runs = array("L", (0, 0, layout.header_bytes))
        for tensor in layout.tensors:
            number = numbers[tensor.layer] if len(self._runs) < 3 * RUNS_MAX else others
            self._tensors[number] += 1
            if self._runs[-3] == number:
                self._runs[-1] = max(self._runs[-1], tensor.end)
            else:
                self._runs.extend((number, tensor.offset, tensor.end))

    def parts(self) -> Iterator[Part]:
        """Yields the layers; padding within a stretch belongs to it."""
        stretches: list[list[tuple[int, int]]] = [[] for _ in self._names]
        for at in range(0, len(self._runs), 3):
            number, first, end = self._runs[at : at + 3]
            if end > first:
                stretches[number].append((first, end))
        for name, tensors, found in zip(self._names, self._tensors, stretches, strict=True):
            if found:
                yield Part(name, tensors, tuple(found))
