"""In which order a decoder uses tensors, told from their names (GGUF and Hugging Face conventions).

It is a first guess: the order of the accesses really observed overrules it.
"""

from __future__ import annotations

import re

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
