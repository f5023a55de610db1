"""Slices of experts, told from headers of both formats, fused and apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmcache.fs.layout.tensors import Experts, ModelLayout, Tensor
from tests.unit.test_make_model import made
from tools.bench.routing import layout_of

SIZES = ("--size", "24M", "--layers", "2", "--experts", "6", "--used", "2", "--slice", "100K")
KINDS = {"gguf": (), "apart": ("--format", "safetensors"), "fused": ("--format", "safetensors", "--fused")}


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_an_expert_tensor_is_one_experts(kind: str, tmp_path: Path) -> None:
    (path,) = made(tmp_path / f"m.{'gguf' if kind == 'gguf' else 'safetensors'}", *SIZES, *KINDS[kind])
    layout = layout_of(path)
    experts = Experts(layout)
    assert [count for _, _, count in experts.layers] == [6, 6] and experts.count == 12
    assert sorted(experts.starts) == list(experts.starts)
    mixed = [tensor for tensor in layout.tensors if "exps" in tensor.name or "experts" in tensor.name]
    assert sum(experts.sizes) == sum(tensor.size_bytes for tensor in mixed)
    assert sum(experts.bytes_of(expert) for expert in range(experts.count)) == sum(experts.sizes)
    assert all(len(experts.ranges(expert)) == 3 for expert in range(experts.count))
    for tensor in mixed:  # an expert's range in each tensor is where its number says
        size = tensor.size_bytes // tensor.experts
        first = next(first for name, first, _ in experts.layers if name == tensor.layer)
        if tensor.experts > 1:
            for expert in range(tensor.experts):
                assert (tensor.offset + expert * size, size) in experts.ranges(first + expert)
        else:
            number = int(tensor.name.split("experts.")[1].split(".")[0])
            assert (tensor.offset, tensor.size_bytes) in experts.ranges(first + number)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_say_where_slices_are(kind: str, tmp_path: Path) -> None:
    (path,) = made(tmp_path / f"m.{'gguf' if kind == 'gguf' else 'safetensors'}", *SIZES, *KINDS[kind])
    experts = Experts(layout_of(path))
    told = [
        (run.first_byte + number * run.slice_bytes, run.slice_bytes, run.first + number)
        for run in experts.runs
        for number in range(run.count)
    ]
    assert told == list(zip(experts.starts, experts.sizes, range(len(experts.starts)), strict=True))
    assert len(experts.runs) <= 6


def test_a_dense_model_has_none(tmp_path: Path) -> None:
    (path,) = made(tmp_path / "m.gguf", "--size", "3M")
    experts = Experts(layout_of(path))
    assert (experts.count, experts.layers, experts.runs) == (0, [], ())


def test_a_header_with_more_slices_than_any_model_costs_nothing() -> None:
    tensors = (Tensor("blk.0.ffn_up_exps.weight", 0, 1 << 40, "F32", experts=1 << 38),)
    assert Experts(ModelLayout("gguf", 0, tensors)).count == 0
