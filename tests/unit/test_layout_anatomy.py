"""Which bytes belong to which layer: every byte of a tensor to one, in the order of computation, with bounds."""

from __future__ import annotations

import itertools
import sys

from hypothesis import given
from hypothesis import strategies as st

from llmcache.fs.layout.tensors import HEADER, LAYERS_MAX, NAME_MAX, OTHERS, RUNS_MAX, Anatomy, ModelLayout, Tensor


def layout(names: list[str], size: int = 100, header: int = 50) -> ModelLayout:
    tensors = [Tensor(name, header + number * size, size, "F16") for number, name in enumerate(names)]
    return ModelLayout("gguf", header, tuple(tensors))


def test_layers_come_in_the_order_of_computation() -> None:
    names = ["output.weight", "token_embd.weight", "blk.1.attn_q.weight", "blk.0.ffn_up.weight", "blk.0.attn_q.weight"]
    parts = list(Anatomy(layout(names)).parts())
    assert [part.name for part in parts] == [HEADER, "token_embd.weight", "blk.0", "blk.1", "output.weight"]
    assert [part.tensors for part in parts] == [0, 1, 2, 1, 1]
    assert parts[2].stretches == ((350, 550),) and parts[2].size_bytes == 200


@given(st.lists(st.integers(0, 5), max_size=40))
def test_every_byte_belongs_to_one_layer(layers: list[int]) -> None:
    found = layout([f"blk.{layer}.t{number}.weight" for number, layer in enumerate(layers)])
    parts = list(Anatomy(found).parts())
    stretches = sorted(stretch for part in parts for stretch in part.stretches)
    assert stretches[0][0] == 0 and stretches[-1][1] == 50 + 100 * len(layers)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(stretches))
    assert sum(part.tensors for part in parts) == len(layers)
    for part in parts[1:]:
        assert part.size_bytes == 100 * sum(f"blk.{layer}" == part.name for layer in layers)


def test_names_of_no_convention_do_not_make_it_large() -> None:
    found = Anatomy(layout([f"strange_{number}" for number in range(20_000)]))
    parts = list(found.parts())
    assert len(parts) == LAYERS_MAX + 1 and parts[-1].name == OTHERS
    assert sum(part.tensors for part in parts) == 20_000
    assert sys.getsizeof(found._runs) < 1 << 20


def test_long_names_and_layers_in_turns_do_not_make_it_large() -> None:
    found = Anatomy(layout([f"blk.{number % 2}.t{number}" for number in range(3 * RUNS_MAX)] + ["x" * 1000]))
    parts = list(found.parts())
    assert [part.name for part in parts] == [HEADER, "blk.0", "blk.1", OTHERS]
    assert sum(part.size_bytes for part in parts) == 50 + 100 * (3 * RUNS_MAX + 1)
    assert sys.getsizeof(found._runs) < 1 << 18 and max(map(len, found._names)) == NAME_MAX


def test_a_tensor_may_be_called_as_what_is_no_tensor() -> None:
    parts = list(Anatomy(layout([HEADER, OTHERS])).parts())
    assert [(part.name, part.tensors) for part in parts] == [(HEADER, 0), (HEADER, 1), (OTHERS, 1)]
