"""`llama-server` for tests: the stock server of the wheel `xllamacpp`, with the options that tests use."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.clients.server_tokens import SITE


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--slot-save-path", default="")
    parser.add_argument("-c", "--ctx-size", type=int, default=0)
    parser.add_argument("-np", "--parallel", type=int, default=1)
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512)
    parser.add_argument("-ctk", "--cache-type-k", default="f16")
    parser.add_argument("-fa", "--flash-attn", default="auto")
    parser.add_argument("--rope-freq-base", type=float, default=0.0)
    parser.add_argument("-kvu", "--kv-unified", action="store_true")
    parser.add_argument("--api-key")
    parser.add_argument("--metrics", action="store_true")
    args = parser.parse_args()

    sys.path.append(str(SITE))
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = args.model
    parameters.hostnames, parameters.port = [args.host], args.port
    parameters.slot_save_path, parameters.endpoint_metrics = args.slot_save_path, args.metrics
    parameters.n_ctx, parameters.n_parallel, parameters.n_ubatch = args.ctx_size, args.parallel, args.ubatch_size
    parameters.cache_type_k = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{args.cache_type_k.upper()}")
    flash = {"on": "ENABLED", "off": "DISABLED"}.get(args.flash_attn, "AUTO")
    parameters.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
    parameters.cache_idle_slots = os.environ.get("LLAMA_ARG_CACHE_IDLE_SLOTS") != "0"
    parameters.kv_unified = args.kv_unified
    parameters.rope_freq_base = args.rope_freq_base
    if args.api_key:
        parameters.api_keys = [args.api_key]
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.warmup, parameters.verbosity = False, 1
    server = xllamacpp.Server(parameters)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while server:
        signal.pause()


if __name__ == "__main__":
    main()
