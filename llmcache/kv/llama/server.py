"""Run llama-cpp-python's OpenAI-compatible server with a PrefixCache.

The server's settings offer only its own caches, so `serve` attaches the PrefixCache to each model that the server loads.
GET /metrics returns its counters (OpenMetrics) without authentication.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from llmcache.errors import MissingRequirement, UsageError
from llmcache.kv.llama.cache import PrefixCache


def serve(cache: PrefixCache, arguments: Sequence[str]) -> int:
    """Run the server with the arguments of `python -m llama_cpp.server`; return its exit code.

    SIGTERM or Ctrl-C ends it, after all queued blocks are written. MissingRequirement: the server's packages are not
    installed; UsageError: invalid arguments, or a model cannot be loaded.
    """
    if any(argument.partition("=")[0] in ("--cache", "--cache_type", "--cache_size") for argument in arguments):
        raise UsageError("--cache: llmcache stores the prompts instead", "remove --cache, --cache_type and --cache_size")
    server, app = (_module(f"llama_cpp.server.{name}") for name in ("__main__", "app"))
    create_app, proxy = server.create_app, app.LlamaProxy

    class Proxy(proxy):  # type: ignore[misc, valid-type]  # the class is imported at run time
        @staticmethod
        def load_llama_from_model_settings(settings: Any) -> Any:
            try:
                llama = proxy.load_llama_from_model_settings(settings)
            except ValueError as error:
                raise UsageError(str(error), "check --model, or the models in --config_file") from error
            llama.set_cache(cache)
            return llama

    def create(*args: Any, **named: Any) -> Any:
        made = create_app(*args, **named)
        response = importlib.import_module("fastapi").Response
        kind = importlib.import_module("prometheus_client.openmetrics.exposition").CONTENT_TYPE_LATEST
        made.add_api_route("/metrics", lambda: response(cache.metrics(), media_type=kind), include_in_schema=False)
        return made

    app.LlamaProxy, server.create_app = Proxy, create
    original_argv, sys.argv = sys.argv, ["llmcache serve-llama", *arguments]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises the signal again after it has ended
    try:
        server.main()
    except SystemExit as ending:
        if ending.code == 1:  # the server has printed the fault and its options
            raise UsageError(
                "the server rejected its arguments, as shown above", "at least a model is needed: -- --model FILE"
            ) from None
        return ending.code if isinstance(ending.code, int) else int(bool(ending.code))
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.argv = original_argv
        app.LlamaProxy, server.create_app = proxy, create_app
        cache.close()
    return 0


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingRequirement(f"{name}: {error}", "pip install 'llama-cpp-python[server]'") from error
