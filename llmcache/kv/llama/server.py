"""llama-cpp-python's OpenAI-compatible server with a PrefixCache: its settings can name its own two caches only.

It is that server, with its own options; each model that it loads is given the one cache, and GET /metrics tells what the
cache has done (OpenMetrics), without the key that other requests may need.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from llmcache.errors import EnvironmentProblem, UsageError
from llmcache.kv.llama.cache import PrefixCache


def serve(cache: PrefixCache, arguments: Sequence[str]) -> int:
    """Serves until it is ended; returns the exit code. `arguments` are those of `python -m llama_cpp.server`.

    Ended by SIGTERM or Ctrl-C it writes what waits to be stored. EnvironmentProblem: the server's own packages are not
    installed; UsageError: it has no use for the arguments, or a model cannot be loaded.
    """
    if any(argument.partition("=")[0] in ("--cache", "--cache_type", "--cache_size") for argument in arguments):
        raise UsageError("--cache: llmcache stores the prompts instead", "remove --cache, --cache_type and --cache_size")
    server, app = (_module(f"llama_cpp.server.{name}") for name in ("__main__", "app"))
    create_app, proxy = server.create_app, app.LlamaProxy

    class Proxy(proxy):  # type: ignore[misc, valid-type]  # a class of a module that is looked for only now
        """Loads models as the server does, and gives them the cache."""

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
    words, sys.argv = sys.argv, ["llmcache serve-llama", *arguments]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises it again when it has ended
    try:
        server.main()
    except SystemExit as ending:
        if ending.code == 1:  # it has said which, with all that it knows
            raise UsageError(
                "the server rejected its arguments, as shown above", "at least a model is needed: -- --model FILE"
            ) from None
        return ending.code if isinstance(ending.code, int) else int(bool(ending.code))
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.argv = words
        app.LlamaProxy, server.create_app = proxy, create_app
        cache.close()
    return 0


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EnvironmentProblem(f"{name}: {error}", "pip install 'llama-cpp-python[server]'") from error
