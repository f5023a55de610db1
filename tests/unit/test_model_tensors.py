"""Layouts of model files: the order of computation, names of shards, layers, and expert slices."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.model.tensors import (
    HEADER,
    LAYERS_MAX,
    OTHERS,
    RUNS_MAX,
    Experts,
    LayerMap,
    ModelLayout,
    Tensor,
    is_expert,
    shard_name,
)
from tests.unit.test_make_model import made
from tools.bench.routing import layout_of

GGUF_LAYER = ["attn_norm", "attn_q", "attn_v", "attn_k", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
HF_LAYER = [
    *["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"],
    *["post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
]
MOE_LAYER = [
    *["attn_norm", "attn_qkv", "attn_q_norm", "attn_k_norm", "attn_output", "ffn_norm", "ffn_gate_inp"],
    *["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "post_ffw_norm"],
]


def names(layer: list[str], layers: int, form: str, ends: tuple[str, str, str]) -> list[str]:
    """Return tensor names in the order of computation; `form` has placeholders for layer number and step."""
    blocks = [form.format(number, step) for number in range(layers) for step in layer]
    return [ends[0], *blocks, ends[1], ends[2]]


GGUF_ENDS = ("token_embd.weight", "output_norm.weight", "output.weight")
HF_ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
MODELS = {
    "gguf": names(GGUF_LAYER, 12, "blk.{}.{}.weight", GGUF_ENDS),
    "moe": names(MOE_LAYER, 3, "blk.{}.{}.weight", GGUF_ENDS),
    "huggingface": names(HF_LAYER, 12, "model.layers.{}.{}.weight", HF_ENDS),
}


def layout(tensor_names: list[str], shard: tuple[int, int] | None = None) -> ModelLayout:
    tensors = [Tensor(name, 100 + 10 * place, 10, "F32") for place, name in enumerate(tensor_names)]
    return ModelLayout("gguf", 100, tuple(tensors), shard)


@pytest.mark.parametrize("model", MODELS)
def test_regions_are_in_the_order_of_computation(model: str) -> None:
    """Only the embedding is read by rows; a tied embedding ends the loop."""
    first, *others = MODELS[model]
    shuffled = MODELS[model].copy()
    random.Random(7).shuffle(shuffled)
    head, *regions = layout(shuffled).regions()
    assert (head.first_byte, head.size_bytes, head.role) == (0, 100, "hot")
    assert [(region.name, region.role) for region in regions] == [(first, "rows"), *((name, "loop") for name in others)]
    _, *tied = layout(MODELS[model][:-1]).regions()
    assert [(region.name, region.role) for region in tied] == [(name, "loop") for name in (*others[:-1], first)]


def names_in_order(*names: str) -> list[str]:
    return [region.name for region in layout(list(names)).regions()[1:]]


def test_unknown_tensors_and_encoders_have_their_place_in_the_order() -> None:
    order = ["blk.0.attn_q.weight", "blk.0.novelty.weight", "blk.0.ffn_up.weight"]
    assert names_in_order(*reversed(order)) == order
    order = ["enc.blk.1.attn_q.weight", "dec.blk.0.attn_q.weight"]
    assert names_in_order(*reversed(order)) == order


def test_experts_are_sparse_and_shared_experts_are_not() -> None:
    sparse = {region.name for region in layout(MODELS["moe"]).regions() if region.sparse}
    assert sparse == {f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(3) for part in ("gate", "up", "down")}
    assert is_expert("model.layers.3.mlp.experts.17.up_proj.weight")
    assert is_expert("model.layers.3.block_sparse_moe.experts.1.w2.weight")
    assert not is_expert("model.layers.3.mlp.shared_experts.up_proj.weight")
    assert not is_expert("blk.3.ffn_up_shexp.weight")


def test_a_single_shard_is_not_assumed_to_be_tied() -> None:
    shard = layout(MODELS["gguf"][:40], shard=(0, 3))
    assert shard.regions()[1].role == "rows" and shard.regions(tied=True)[-1].role == "loop"


def test_shard_names_are_parsed() -> None:
    first = shard_name("dir/llama-70b-00001-of-00003.gguf")
    last = shard_name("dir/llama-70b-00003-of-00003.gguf")
    assert first is not None and last is not None
    assert (first.number, first.count, last.number) == (0, 3, 2)
    for name in ("", "model.gguf", "m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-1-of-3.gguf", "m-00001-of-00003.md"):
        assert shard_name(name) is None


def stored(names: list[str], size: int = 100, header: int = 50) -> ModelLayout:
    tensors = [Tensor(name, header + number * size, size, "F16") for number, name in enumerate(names)]
    return ModelLayout("gguf", header, tuple(tensors))


def test_layers_are_in_the_order_of_computation() -> None:
    names = ["output.weight", "token_embd.weight", "blk.1.attn_q.weight", "blk.0.ffn_up.weight", "blk.0.attn_q.weight"]
    parts = list(LayerMap(stored(names)).parts())
    assert [part.name for part in parts] == [HEADER, "token_embd.weight", "blk.0", "blk.1", "output.weight"]
    assert [part.tensors for part in parts] == [0, 1, 2, 1, 1]
    assert parts[2].stretches == ((350, 550),) and parts[2].size_bytes == 200
    for name, layer in (
        ("model.layers.12.self_attn.q_proj.weight", "model.layers.12"),
        ("transformer.h.0.mlp.c_fc.bias", "transformer.h.0"),
        ("v.blk.7.ffn_up.weight", "v.blk.7"),
        ("token_embd.weight", "token_embd.weight"),
    ):
        assert Tensor(name, 0, 1, "").layer == layer
    strange = list(LayerMap(stored([HEADER, OTHERS])).parts())  # a tensor may have the name of a special layer
    assert [(part.name, part.tensors) for part in strange] == [(HEADER, 0), (HEADER, 1), (OTHERS, 1)]


@given(st.lists(st.integers(0, 5), max_size=40))
def test_every_byte_belongs_to_one_layer(layers: list[int]) -> None:
    found = stored([f"blk.{layer}.t{number}.weight" for number, layer in enumerate(layers)])
    parts = list(LayerMap(found).parts())
    stretches = sorted(stretch for part in parts for stretch in part.stretches)
    assert stretches[0][0] == 0 and stretches[-1][1] == 50 + 100 * len(layers)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(stretches))
    assert sum(part.tensors for part in parts) == len(layers)
    for part in parts[1:]:
        assert part.size_bytes == 100 * sum(f"blk.{layer}" == part.name for layer in layers)


def test_unconventional_names_do_not_add_unlimited_layers() -> None:
    found = LayerMap(stored([f"strange_{number}" for number in range(5000)]))
    parts = list(found.parts())
    assert len(parts) == LAYERS_MAX + 1 and parts[-1].name == OTHERS
    assert sum(part.tensors for part in parts) == 5000
    in_turns = LayerMap(stored([f"blk.{number % 2}.t{number}" for number in range(3 * RUNS_MAX)] + ["x" * 1000]))
    parts = list(in_turns.parts())
    assert [part.name for part in parts] == [HEADER, "blk.0", "blk.1", OTHERS]
    assert sum(part.size_bytes for part in parts) == 50 + 100 * (3 * RUNS_MAX + 1)


SIZES = ("--size", "24M", "--layers", "2", "--experts", "6", "--used", "2", "--slice", "100K")
KINDS = {"gguf": (), "apart": ("--format", "safetensors"), "fused": ("--format", "safetensors", "--fused")}


@pytest.mark.parametrize("kind", KINDS)
def test_each_byte_of_an_expert_tensor_belongs_to_one_expert(kind: str, tmp_path: Path) -> None:
    (path,) = made(tmp_path / f"m.{'gguf' if kind == 'gguf' else 'safetensors'}", *SIZES, *KINDS[kind])
    layout = layout_of(path)
    experts = Experts(layout)
    assert [count for _, _, count in experts.layers] == [6, 6] and experts.count == 12
    assert sorted(experts.starts) == list(experts.starts)
    assert len(experts.runs) <= 6 and list(zip(experts.starts, experts.sizes, range(len(experts.starts)), strict=True)) == [
        (run.first_byte + number * run.slice_bytes, run.slice_bytes, run.first + number)
        for run in experts.runs
        for number in range(run.count)
    ]
    mixed = [tensor for tensor in layout.tensors if "exps" in tensor.name or "experts" in tensor.name]
    assert sum(experts.sizes) == sum(tensor.size_bytes for tensor in mixed)
    assert sum(experts.bytes_of(expert) for expert in range(experts.count)) == sum(experts.sizes)
    assert all(len(experts.ranges(expert)) == 3 for expert in range(experts.count))
    for tensor in mixed:  # the range of an expert in each tensor follows from its number
        size = tensor.size_bytes // tensor.experts
        first = next(first for name, first, _ in experts.layers if name == tensor.layer)
        if tensor.experts > 1:
            for expert in range(tensor.experts):
                assert (tensor.offset + expert * size, size) in experts.ranges(first + expert)
        else:
            number = int(tensor.name.split("experts.")[1].split(".")[0])
            assert (tensor.offset, tensor.size_bytes) in experts.ranges(first + number)
