"""The model of a Llama: its fingerprint, and the names of the blocks of its prompts."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import Llama
from numpy.typing import NDArray

from llmcache.kv.prefix.identity import FileIdentity
from llmcache.kv.prefix.store import CUT, PART, WHOLE, Block, BlockKey, block_name
from llmcache.model.tensors import shard_names

BLOCK_TOKENS = 256
LINKED_TOKENS = (128, 64, 32, 16)
"""Numbers of first tokens by which links find a block; blocks and common beginnings below the least are not used."""
LEAST_TOKENS = LINKED_TOKENS[-1]
FORMAT = 2  # version of fingerprints: increase it if their input or the layout of blocks changes
_ROPE = ("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast")
_CACHE = ("type_k", "type_v", "flash_attn_type", "attention_type", "swa_full", "n_seq_max", "kv_unified")
_CONTEXT = (*_ROPE, "yarn_beta_slow", "yarn_orig_ctx", *_CACHE)


@dataclass
class Model:
    """The model of a Llama, with its settings.

    `description` is the input of the fingerprint `root`, in hexadecimal, which is empty until the files are identified and
    serves as the parent of the first block. `whole`: states cannot be cut. `refused`: why nothing is stored.
    """

    description: dict[str, Any]
    whole: bool = False
    refused: str = ""
    files: tuple[FileIdentity, ...] = ()  # files of the model, and of a LoRA adapter
    root: str = ""
    has_waited: bool = False
    token_s: float = 0.0  # time to evaluate a token; 0 until it is measured

    @property
    def name(self) -> str:
        return self.root[:32]

    @property
    def usable(self) -> bool:
        return bool(self.root) and not self.refused

    def identify(self, digests: list[str]) -> None:
        models = len(self.files) - (self.description["lora"] is not None)
        self.description["files"] = [
            [file.stamp.size_bytes, digest] for file, digest in zip(self.files[:models], digests, strict=False)
        ]
        if self.description["lora"] is not None:
            self.description["lora"] = [digests[-1], self.description["lora"][-1]]
        identity = {key: value for key, value in self.description.items() if key not in ("file", "name")}
        text = json.dumps(identity, sort_keys=True)
        self.root = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()[:40]


def describe(llama: Llama) -> Model:
    """Describe everything except the tokens that the keys and values of `llama` depend on. OSError."""
    paths = [*shard_names(llama.model_path), *([llama.lora_path] if llama.lora_path else [])]
    metadata, handle = llama.metadata, llama.model
    context = {name: getattr(llama.context_params, name) for name in _CONTEXT}
    # Some models have two sets of rope factors: for contexts up to a length (default: that of training), and for longer.
    if any(".rope.scaling." in key for key in metadata) or context["yarn_orig_ctx"]:
        context["n_ctx"] = llama.n_ctx()
    else:
        context["n_ctx"] = llama.n_ctx() > llama_cpp.llama_model_n_ctx_train(handle)
    description: dict[str, Any] = {
        "format": FORMAT,
        "file": os.path.basename(llama.model_path),
        "architecture": metadata.get("general.architecture", ""),
        "name": metadata.get("general.name", ""),
        "lora": [llama.lora_scale] if llama.lora_path else None,
        "overrides": repr(llama.kv_overrides),
        "context": context,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("LLAMA_ATTN")},
        "library": ["llama-cpp-python", llama_cpp.__version__, llama_cpp.LLAMA_STATE_SEQ_VERSION],
        "block_tokens": BLOCK_TOKENS,
    }
    whole = bool(llama_cpp.llama_model_is_recurrent(handle) or llama_cpp.llama_model_is_hybrid(handle))
    whole |= llama_cpp.llama_model_n_swa(handle) > 0 and not llama.context_params.swa_full
    if hasattr(llama.chat_handler, "clip_model_path"):
        return Model(description, whole, "prompts with images cannot be identified by their tokens")
    if llama.context_params.embeddings:
        return Model(description, whole, "the model computes embeddings")
    files = tuple(FileIdentity(path) for path in paths)
    # llama.cpp records the monotonic time at which it started to load.
    loaded_ns = time.time_ns() - time.monotonic_ns() + int(llama_cpp.llama_perf_context(llama.ctx).t_start_ms * 1e6)
    replaced = [f"{os.path.realpath(path)} (deleted)" for path in paths]
    maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    if any(file.stamp.ctime_ns > loaded_ns for file in files) or any(name in maps for name in replaced):
        return Model(description, whole, "the file was changed or replaced after it was loaded")
    return Model(description, whole, files=files)


def keys_of(model: Model, tokens: Sequence[int], part: bool = False) -> list[BlockKey]:
    """Return the keys of all whole blocks of `tokens`; with `part`, also of the rest if it has LEAST_TOKENS."""
    ids: NDArray[np.int32] = np.asarray(tokens, np.dtype("<i4"))
    name, keys = model.root, []
    for start in range(0, len(ids), BLOCK_TOKENS):
        block = ids[start : start + BLOCK_TOKENS]
        if len(block) < BLOCK_TOKENS and (not part or len(block) < LEAST_TOKENS):
            break
        name = block_name(name, block)
        kind = PART if len(block) < BLOCK_TOKENS else WHOLE if model.whole else CUT
        keys.append(BlockKey(model.name, name, start // BLOCK_TOKENS, kind))
    return keys


def is_of(model: Model, keys: Sequence[BlockKey], key: BlockKey, block: Block) -> bool:
    """Return whether the tokens of `block` give the name in `key`, which is one of `keys` or their successor."""
    parent = keys[key.index - 1].name if key.index else model.root
    return block_name(parent, np.asarray(block.tokens)) == key.name


def links_of(parent: str, tokens: Sequence[int]) -> list[str]:
    """Return the links to blocks after `parent` that begin like `tokens`, the longest beginning first."""
    ids = np.asarray(tokens[: LINKED_TOKENS[0]], np.dtype("<i4"))
    prefixes = [bytes.fromhex(parent) + ids[:count].tobytes() for count in LINKED_TOKENS if count <= len(ids)]
    return [hashlib.blake2b(prefix, digest_size=20, person=b"link").hexdigest() for prefix in prefixes]
