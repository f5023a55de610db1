"""Shapes of the language models that Kelle is evaluated on (section 7.1), from their public configurations."""

from __future__ import annotations

from dataclasses import dataclass

from llmcache.edram.constants import CHIP


@dataclass(frozen=True)
class LlmShape:
    """What a decoder-only transformer costs: layers, channels, heads, widths, vocabulary. Weights have one byte each.

    `gated`: the feed-forward network has a gate beside up and down. `tied`: the head is the embedding table.
    ValueError, naming the field, for what no model can be.
    """

    name: str
    layers: int
    channels: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    gated: bool = True
    tied: bool = False

    def __post_init__(self) -> None:
        for field in ("layers", "channels", "heads", "kv_heads", "head_dim", "hidden", "vocabulary"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)}, at least 1 is needed")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} do not divide {self.heads} heads")

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns the weight matrices of a layer by name: (inputs, outputs)."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = {"q": (self.channels, query), "k": (self.channels, key), "v": (self.channels, key)}
        found |= {"o": (query, self.channels), "up": (self.channels, self.hidden), "down": (self.hidden, self.channels)}
        return found | ({"gate": (self.channels, self.hidden)} if self.gated else {})

    @property
    def layer_weights(self) -> int:
        """Weights of a layer."""
        return sum(inputs * outputs for inputs, outputs in self.matrices().values())

    @property
    def read_weights(self) -> int:
        """Weights that every token reads: all layers and the head; of the embedding it needs one row, not counted."""
        return self.layers * self.layer_weights + self.channels * self.vocabulary

    @property
    def stored_weights(self) -> int:
        """Weights that memory holds: also the embedding table, where it is not the head."""
        return self.read_weights + (0 if self.tied else self.channels * self.vocabulary)

    @property
    def kv_layer_bytes(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * CHIP.value_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return self.layers * self.kv_layer_bytes

    @property
    def x_layer_bytes(self) -> int:
        """Bytes of a token's input to one layer, which can stand for its keys and values (section 4.1.2)."""
        return self.channels * CHIP.value_bytes


MODELS: dict[str, LlmShape] = {
    shape.name: shape
    for shape in (
        LlmShape("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        LlmShape("llama2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
        LlmShape("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        LlmShape("llama3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256, tied=True),
        LlmShape("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000),
        LlmShape("qwen2-7b", 28, 3584, 28, 4, 128, 18944, 152064),
        LlmShape("opt-6.7b", 32, 4096, 32, 32, 128, 16384, 50272, gated=False, tied=True),
    )
}
"""The models of section 7.1, from their configurations on the Hugging Face hub."""
