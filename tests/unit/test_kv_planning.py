"""Planning: model shapes, memory, pools, and the latency model of every system, compared with sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmcache.errors import UsageError
from llmcache.kv.planning.hardware import MACHINES, NUMBERS, ORIGINS, PAPER_PC
from llmcache.kv.planning.latency import SYSTEMS, hillinfer, latency, place
from llmcache.kv.planning.placement import Workload, by_ssd_share, largest_context, memory_use, room, rule_share
from llmcache.model.shapes import MODELS, ModelShape, shape_of

QWEN = MODELS["Qwen-7B"]
GIB = 1 << 30

# `config.json` of public models, with the fields that planning reads

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = LLAMA_8B | {
    "model_type": "mixtral", "vocab_size": 32000, "max_position_embeddings": 32768, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = LLAMA_8B | {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
}  # fmt: skip
GLM_4_5: dict[str, Any] = LLAMA_8B | {
    "model_type": "glm4_moe", "num_hidden_layers": 92, "hidden_size": 5120, "num_attention_heads": 96, "head_dim": 128,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 151552,
}  # fmt: skip

# Machines


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_every_number_of_a_machine_has_an_origin(machine: Any) -> None:
    assert set(machine.origins) == set(NUMBERS)
    assert all(origin.text and origin.kind in ORIGINS for origin in machine.origins.values())


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_without_a_gpu_the_cpu_computes_at_the_speed_of_its_memory(machine: Any) -> None:
    host = machine.with_sizes(gpu_bytes=0)
    test_every_number_of_a_machine_has_an_origin(host)
    assert (host.gpu_bytes_per_s, host.gpu_reserved_bytes) == (machine.host_bytes_per_s, 0)
    full = latency("full", host, QWEN, Workload(4096, batch=1))
    assert full.token_ns / 1e9 > QWEN.weight_bytes / machine.host_bytes_per_s * 0.9


# Models and memory


def test_parameters_of_the_papers_models() -> None:
    for name, billions in (("Qwen-7B", 7.72), ("Llama2-13B", 13.02), ("LongChat-7B", 6.74), ("OPT-6.7B", 6.66)):
        assert MODELS[name].parameters / 1e9 == pytest.approx(billions, abs=0.006), name


def test_figure_2_within_three_percent_in_gib() -> None:
    for name, gib in (("Qwen-7B", 30), ("Llama2-13B", 51)):
        assert memory_use(MODELS[name], 4096, 8).total / GIB == pytest.approx(gib, rel=0.03), name


def test_a_token_more_than_the_largest_context_does_not_fit() -> None:
    memory = 44.0 * GIB
    most = largest_context(QWEN, 8, memory)
    assert memory_use(QWEN, most, 8).total <= memory < memory_use(QWEN, most + 1, 8).total
    assert largest_context(QWEN, 8, 10 * GIB) == 0


# Configs


def shape(**changes: Any) -> ModelShape:
    config = {name: value for name, value in (LLAMA_8B | changes).items() if value is not ...}
    return shape_of(config, "models/Llama-3.1-8B/config.json")


def test_a_llama_config() -> None:
    found = shape()
    assert found.name == "Llama-3.1-8B" and found.parameters / 1e9 == pytest.approx(8.03, abs=0.01)
    assert (found.kv_heads, found.head_dim, found.kv_dtype, found.context_limit) == (8, 128, "bfloat16", 131072)
    assert shape(num_key_value_heads=None).kv_heads == 32


@pytest.mark.parametrize(
    ("quantised", "bits", "noted"),
    [
        ({"quant_method": "gptq", "bits": 4}, 4, False), ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4, False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8, False), ({"quant_method": "mxfp4"}, 16, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("inside", [False, True])
def test_quantized_weights_have_their_number_of_bits(
    quantised: dict[str, Any], bits: int, noted: bool, inside: bool
) -> None:
    config = {"text_config": LLAMA_8B} if inside else LLAMA_8B
    shape = shape_of(config | {"quantization_config": quantised}, "config.json")
    assert shape.weight_bits == bits and bool(shape.notes) == noted


def test_other_field_names_of_sizes() -> None:
    small = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    gpt2 = shape_of(small, "gpt2/config.json")
    assert gpt2.parameters / 1e6 == pytest.approx(124.3, abs=0.2)
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_dim": 16384, "vocab_size": 50272}
    opt = sizes | {"model_type": "opt", "max_position_embeddings": 2048}
    assert shape_of(opt, "x").parameters == MODELS["OPT-6.7B"].parameters
    qwen = shape(model_type="qwen", intermediate_size=22016, num_key_value_heads=None, vocab_size=151936, seq_length=8192)
    assert qwen.parameters == QWEN.parameters
    qwen3 = shape(model_type="qwen3", head_dim=64)
    assert qwen3.head_dim == 64
    nested = shape_of({"model_type": "llava", "text_config": LLAMA_8B}, "x/config.json")
    assert nested.layers == 32


def test_parameters_of_moe_models_match_their_published_counts() -> None:
    """The makers count the token embedding as used, of which a token reads one row."""
    for config, billions, used in ((MIXTRAL_8X7B, 46.7, 12.7), (QWEN3_30B_A3B, 30.5, 3.0), (GLM_4_5, 352, 32)):
        found = shape_of(config, "x/config.json")
        assert found.parameters / 1e9 == pytest.approx(billions, rel=0.01)
        assert found.token_parameters / 1e9 == pytest.approx(used, rel=0.03)


def test_an_moe_model_stores_all_weights_and_reads_those_of_the_batch() -> None:
    mixture, dense = shape_of(MIXTRAL_8X7B, "x"), shape_of(MIXTRAL_8X7B | {"num_local_experts": 0}, "x")
    assert mixture.token_bytes == dense.token_bytes and mixture.weight_bytes > 6 * dense.weight_bytes
    used = (mixture.layer_weight_bytes(1) - dense.layer_weight_bytes(1)) / (3 * 4096 * 14336 * 2)
    assert used == pytest.approx(2 - 1, abs=0.001)  # two experts instead of one MLP, and a router
    assert mixture.layer_weight_bytes(4) < 4 * mixture.layer_weight_bytes(1)
    assert 32 * mixture.layer_weight_bytes(1000) == pytest.approx(mixture.weight_bytes - 2 * 32000 * 4096 * 2)


def test_used_experts_on_the_host_are_transferred() -> None:
    """With a GPU of 24 GiB, it has dense weights and some experts; others are in memory, with 1/4 of them used per token."""
    mixture, work = shape_of(MIXTRAL_8X7B, "x"), Workload(4096, batch=1)
    machine = PAPER_PC.with_sizes(host_bytes=128 * GIB)
    on_host = room(machine, mixture, work, work.alpha).weights_on_host
    moved = latency("hillinfer", machine, mixture, work).moved["host to gpu"]
    assert on_host > 60e9
    assert moved - work.alpha * mixture.kv_bytes(4096, 1) == pytest.approx(on_host / 4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": ...}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers: True"),
        ({"num_key_value_heads": 5}, "kv_heads: must divide the heads .*, not 5"),
        ({"hidden_size": -1}, "hidden_size: -1"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"num_local_experts": 8}, "num_experts_per_tok"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "used: must be from 1 to the number of experts .*, not 9"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ],
)
def test_an_unsupported_config_names_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        shape(**changes)
    assert caught.value.message.startswith("--model: ") and caught.value.hint


# Pools


def test_the_rule_is_equation_1_limited_by_m0() -> None:
    share = rule_share(PAPER_PC)
    assert share / (1 - share) == pytest.approx(PAPER_PC.score_bytes_per_s / PAPER_PC.device_bytes_per_s)
    small, large = Workload(8192), Workload(32768)
    for workload, binds in ((small, False), (large, True)):
        kv = QWEN.kv_bytes(workload.context, 8)
        found = room(PAPER_PC, QWEN, workload, 0.2)
        places = place(SYSTEMS["hillinfer"], found, kv, PAPER_PC)
        assert places.total == pytest.approx(kv) and places.gpu == 0
        if binds:
            assert places.host == found.host_kv < share * kv
        else:
            assert places.beta == pytest.approx(PAPER_PC.score_bytes_per_s / PAPER_PC.device_bytes_per_s)


# Latency: sums by hand, for a model of one layer

ONE = ModelShape("one", 1, 1024, 8, 8, 128, 4096, 1000)
# 1 GB of KV, half of it keys.
PLAIN = Workload(context=1 << 18, batch=1, alpha=0.25, chunk_tokens=10)
KV = ONE.kv_bytes(PLAIN.context, 1)
FLAT = replace(
    PAPER_PC,
    gpu_link_bytes_per_s=8e9,
    score_bytes_per_s=10e9,
    ssd_bytes_per_s=2e9,
    ssd_requests_per_s=1e12,
    device_bytes_per_s=4e9,
    device_link_bytes_per_s=1e9,
    device_latency_ns=0,
)
HALF = by_ssd_share(KV, 0.5)


def parts(policy: Any, workload: Workload = PLAIN) -> tuple[float, float, float]:
    """Return the seconds of evaluation, of fetch, and of exposed time per GB of KV."""
    found = latency(policy, FLAT, ONE, workload, HALF)
    gb = KV / 1e9
    return found.stages["evaluate"] / 1e9 / gb, found.stages["fetch"] / 1e9 / gb, found.exposed_ns / 1e9 / gb


@pytest.mark.parametrize(
    ("policy", "evaluate", "fetch"),
    [
        ("full", 0, max(0.5 / 2, 1 / 8)),
        # A token's keys have 2048 bytes here, and a read takes twice as much, a whole block.
        ("h2o", 0.25 / 2 + 0.5 / 10, 0.25 * 0.5 / 1 + 0.25 / 8),
        ("prefetch", max(0.25 / 2, 0.5 / 10), max(0.25 * 0.5 / 1, 0.25 / 8)),
        # Two keys per chunk; chunks of 20 KiB are whole blocks.
        ("leoam", max(0.2 * 0.25 / 2, 0.2 * 0.5 / 10), 0.25 * 0.5 / 2),
        ("hillinfer", max(0.25 / 10, 0.25 / 4), max(0.25 * 0.5 / 1, 0.25 / 8)),
    ],
)
def test_evaluation_and_fetch_of_each_system(policy: str, evaluate: float, fetch: float) -> None:
    assert parts(policy)[:2] == pytest.approx((evaluate, fetch))


def test_an_evaluation_with_values_fetches_no_values_again() -> None:
    both = replace(PLAIN, host_evaluates="keys and values")
    assert parts("prefetch", both)[:2] == pytest.approx((0.5 / 2, 0.25 / 8))


def test_bytes_that_hillinfer_moves() -> None:
    """Evaluation moves 1/64: with d = 128 in half precision, a key has 256 bytes and its score 4."""
    moved = latency("hillinfer", FLAT, ONE, PLAIN, HALF).moved
    assert moved["ssd to host"] == 0
    assert moved["device internal"] == pytest.approx(KV * (0.25 + 0.125))
    assert moved["device to host"] == pytest.approx(KV * 0.125 + KV / 4 / 64)


def test_each_design_of_hillinfer_matters() -> None:
    no_hie, no_app = hillinfer("hie"), hillinfer("app")
    assert no_hie.name == "hillinfer-no-hie" and hillinfer().name == "hillinfer"
    assert parts(no_hie)[0] == parts("prefetch")[0] > parts("hillinfer")[0]
    assert parts(no_app)[2] > parts("hillinfer")[2]
    kept = replace(PLAIN, important_on_ssd=0.5, important_on_ssd_bkp=0.1)
    assert parts("hillinfer", kept)[1] < parts(hillinfer("bkp"), kept)[1] == parts("hillinfer")[1]
    assert hillinfer("hie", "bkp", "app").title == "HillInfer without HIE, BKP, APP"
