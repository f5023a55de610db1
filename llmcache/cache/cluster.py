"""The simulation grid on a Dask cluster: each task computes some sizes of one policy on one trace.

The bytes of a trace are sent with its tasks. `distributed` is an extra [cluster].
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcache import __version__
from llmcache.cache.plan import Plan, Progress
from llmcache.cache.results import Simulation, merged
from llmcache.cache.simulate import ModelsOf, simulate_all
from llmcache.errors import LlmcacheError, MissingRequirement
from llmcache.trace.record import readable

CONNECT_S = 10


def simulate_on(
    address: str, traces: Sequence[str], plan: Plan, *, progress: Progress | None = None, models: ModelsOf | None = None
) -> Simulation:
    """Return the rows of `plan` for all `traces`, computed by the workers of the Dask scheduler at `address`."""
    names = list(dict.fromkeys(traces))
    with _client(address) as client:
        parts = parts_of(plan, _checked_threads(client) // len(names))
        futures, name_of = [], dict[str, str]()
        for name in names:
            with readable(name):
                content = client.scatter(Path(name).read_bytes())
            futures += [client.submit(_task, name, part, content, models, pure=False) for part in parts]
            name_of |= {future.key: name for future in futures[-len(parts) :]}
        try:
            return merged(_gathered(client, futures, name_of, progress))
        finally:
            client.cancel(futures, force=True)


def parts_of(plan: Plan, threads: int) -> list[Plan]:
    """Cut `plan` into at least `threads` parts if possible, each with some sizes of one policy."""
    groups = max(1, min(len(plan.sizes), -(-threads // max(1, len(plan.policies)))))
    step = -(-len(plan.sizes) // groups)
    sizes = [plan.sizes[start : start + step] for start in range(0, len(plan.sizes), step)]
    parts = [replace(plan, policies=(policy,), sizes=group, curves=False) for policy in plan.policies for group in sizes]
    return [replace(parts[0], curves=plan.curves), *parts[1:]]


@contextmanager
def _client(address: str) -> Iterator[Any]:
    try:
        from distributed import Client
        from distributed.comm.core import connect
    except ImportError as error:
        raise MissingRequirement(
            "--scheduler needs dask.distributed, which is not installed", "pip install 'llmcache-toolkit[cluster]'"
        ) from error

    async def greet() -> None:
        comm = await connect(address, timeout=CONNECT_S)  # type: ignore[no-untyped-call]
        await comm.close()

    try:
        # A Client that fails to connect is only half constructed. If it is garbage-collected in the new thread of
        # another client, the two threads deadlock. So test the connection first.
        asyncio.run(greet())
        client = Client(address, timeout=CONNECT_S, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TypeError) as error:
        raise MissingRequirement(
            f"--scheduler: cannot reach a Dask scheduler at '{address}': {error}",
            "start one with: dask scheduler; its address looks like tcp://host:8786",
        ) from error
    with client:
        yield client


def _checked_threads(client: Any) -> int:
    """Return the threads of all workers; MissingRequirement without workers, or with another llmcache."""
    try:
        client.wait_for_workers(1, timeout=CONNECT_S)
    except TimeoutError as error:
        raise MissingRequirement(
            f"--scheduler: no worker connected within {CONNECT_S} s", "start one with: dask worker ADDRESS"
        ) from error
    # Not a function of llmcache: a worker without llmcache could not unpickle it.
    versions = client.run(eval, "__import__('llmcache').__version__", on_error="return")
    for worker, version in versions.items():
        if version != __version__:
            found = "no llmcache" if isinstance(version, Exception) else f"llmcache {version}"
            raise MissingRequirement(
                f"--scheduler: worker {worker} has {found}, but this machine has {__version__}",
                "install the same version on all workers",
            )
    return sum(client.nthreads().values())


def _gathered(client: Any, futures: list[Any], name_of: dict[str, str], progress: Progress | None) -> list[Simulation]:
    from distributed import as_completed

    done: dict[str, Simulation] = {}
    for future in as_completed(futures, loop=client.loop):  # type: ignore[no-untyped-call]
        name = name_of[future.key]
        try:
            done[future.key] = future.result()
        except LlmcacheError:
            raise
        except Exception as error:
            raise MissingRequirement(
                f"--scheduler: a worker failed on '{name}': {type(error).__name__}: {error}",
                "see its log; a local run (without --scheduler) shows whether the trace is the cause",
            ) from error
        if progress is not None:
            progress(name, sum(name_of[key] == name for key in done), len(futures) // len(set(name_of.values())))
    return [done[future.key] for future in futures]


def _task(name: str, plan: Plan, content: bytes, models: ModelsOf | None) -> Simulation:
    with tempfile.TemporaryDirectory(prefix="llmcache-") as directory:
        path = os.path.join(directory, os.path.basename(name))
        Path(path).write_bytes(content)
        done = simulate_all([path], plan, jobs=1, models=models)
    return replace(
        done,
        traces=tuple(replace(each, trace=name) for each in done.traces),
        results=tuple(replace(each, trace=name) for each in done.results),
        curves=tuple(replace(each, trace=name) for each in done.curves),
    )
