"""Tensors and arrays share memory, and bfloat16 keeps its bits."""

import numpy as np
import pytest
import torch

from llmcache.errors import UsageError
from llmcache.kv.transformers.tensors import as_array, as_tensor, dtype_name


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_there_and_back_is_the_same_memory(name: str) -> None:
    dtype = getattr(torch, name)
    tensor = torch.randn(2, 3, 5).to(dtype)
    assert dtype_name(dtype) == name
    array = as_array(tensor)
    assert array.dtype == (np.uint16 if name == "bfloat16" else np.dtype(name))
    back = as_tensor(array, dtype, torch.device("cpu"))
    assert torch.equal(back, tensor)
    array[0, 0, 0] = 0
    assert tensor[0, 0, 0] == 0
    assert back[0, 0, 0] == 0


def test_a_type_without_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="dtype"):
        dtype_name(torch.float64)
