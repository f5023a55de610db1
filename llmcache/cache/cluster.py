"""The grid on a Dask cluster: a task is some sizes of one policy on one trace, and gives the rows of a local run.

How a trace gets to the workers: up to `SENT_BYTES` its bytes travel with the tasks, once to each worker that needs them,
so nothing has to be shared. A larger one must be readable under the same absolute path on every worker and be the same
there, by size and checksum of its ends; a worker where it is not ends the simulation with its name.

Workers need this version of llmcache. `distributed` (extra [cluster]) is imported here only, when it is called for.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcache import __version__
from llmcache.cache.plan import Plan, Progress
from llmcache.cache.results import Simulation, merged
from llmcache.cache.simulate import ModelsOf, no_models, simulate_all
from llmcache.errors import EnvironmentProblem, LlmcacheError, UsageError

SENT_BYTES = 256 << 20
CONNECT_S = 10
_ENDS_BYTES = 1 << 20


@dataclass(frozen=True)
class Remote:
    """A trace as a worker gets it: its name here, and its absolute path with what tells that it is the same file."""

    name: str
    path: str
    size_bytes: int
    digest: str

    @classmethod
    def of(cls, name: str) -> Remote:
        """Returns the trace called `name` on this machine; UsageError or EnvironmentProblem if it cannot be read."""
        path = os.path.abspath(name)
        try:
            return cls(name, path, os.path.getsize(path), _digest(path))
        except FileNotFoundError as error:
            raise UsageError(f"'{name}' does not exist", "check the path") from error
        except OSError as error:
            raise EnvironmentProblem(f"cannot read '{name}': {error.strerror}", "check its permissions") from error


def _digest(path: str) -> str:
    """Checksum of both ends of a file, where formats keep what a change alters."""
    with open(path, "rb") as file:
        ends = file.read(_ENDS_BYTES)
        file.seek(max(0, os.path.getsize(path) - _ENDS_BYTES))
        return hashlib.sha256(ends + file.read()).hexdigest()


def simulate_on(
    address: str, traces: Sequence[str], plan: Plan, *, progress: Progress | None = None, models: ModelsOf = no_models
) -> Simulation:
    """Returns the rows of `plan` for all `traces`, computed by the workers of the scheduler at `address`.

    Models are looked at where a worker sees them; see `simulate_all`.
    """
    with _client(address) as client:
        threads = _checked_threads(client)
        remotes = [Remote.of(name) for name in dict.fromkeys(traces)]
        tasks = [(remote, part) for remote in remotes for part in parts_of(plan, threads // len(remotes))]
        sent = [remote for remote in remotes if remote.size_bytes <= SENT_BYTES]
        contents = {remote: client.scatter(Path(remote.path).read_bytes()) for remote in sent}
        futures = [client.submit(_task, remote, part, contents.get(remote), models, pure=False) for remote, part in tasks]
        try:
            done = _gathered(client, futures, [remote.name for remote, _ in tasks], progress)
        finally:
            client.cancel(futures, force=True)
    return merged(done)


def parts_of(plan: Plan, threads: int) -> list[Plan]:
    """Returns `plan` cut into at least `threads` parts where it can be: each policy apart, then its sizes in groups.

    In the order of the plan's rows; the curve, if wanted, is with the first part.
    """
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
        raise EnvironmentProblem(
            "--scheduler needs dask.distributed, which is not installed", "pip install 'llmcache-toolkit[cluster]'"
        ) from error

    async def greet() -> None:
        comm = await connect(address, timeout=CONNECT_S)  # type: ignore[no-untyped-call]
        await comm.close()

    try:
        # A Client that finds nobody stays half made. Collected in another client's new thread, it waits for a lock that
        # who waits for that thread holds: so ask first.
        asyncio.run(greet())
        client = Client(address, timeout=CONNECT_S, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TypeError) as error:
        raise EnvironmentProblem(
            f"--scheduler: no Dask scheduler answers at '{address}': {error}",
            "start one with: dask scheduler; its address looks like tcp://host:8786",
        ) from error
    with client:
        yield client


def _checked_threads(client: Any) -> int:
    """Returns the threads of all workers; EnvironmentProblem if there is none, or one without this llmcache."""
    try:
        client.wait_for_workers(1, timeout=CONNECT_S)
    except TimeoutError as error:
        raise EnvironmentProblem(
            f"--scheduler: no worker came in {CONNECT_S} s", "start one with: dask worker ADDRESS"
        ) from error
    # Not a function of ours: where llmcache is missing it could not even be unpickled.
    versions = client.run(eval, "__import__('llmcache').__version__", on_error="return")
    for worker, version in versions.items():
        if version != __version__:
            found = "none" if isinstance(version, Exception) else version
            raise EnvironmentProblem(
                f"--scheduler: worker {worker} has llmcache {found}, this is {__version__}",
                "install the same version on all workers",
            )
    return sum(client.nthreads().values())


def _gathered(client: Any, futures: list[Any], names: list[str], progress: Progress | None) -> list[Simulation]:
    """Returns what the tasks gave, in their order; raises what the first failing one raised."""
    from distributed import as_completed

    name_of = {future.key: name for future, name in zip(futures, names, strict=True)}
    done: dict[str, Simulation] = {}
    for future in as_completed(futures, loop=client.loop):  # type: ignore[no-untyped-call]
        name = name_of[future.key]
        try:
            done[future.key] = future.result()
        except LlmcacheError:
            raise
        except Exception as error:
            raise EnvironmentProblem(
                f"--scheduler: a worker failed on '{name}': {type(error).__name__}: {error}",
                "its log says more; a local run (without --scheduler) tells whether the trace is to blame",
            ) from error
        if progress is not None:
            progress(name, sum(name_of[key] == name for key in done), names.count(name))
    return [done[future.key] for future in futures]


def _task(remote: Remote, plan: Plan, content: bytes | None, models: ModelsOf) -> Simulation:
    """Returns the rows of `plan`, computed by the worker that calls this, in one thread of its own."""
    with tempfile.TemporaryDirectory(prefix="llmcache-") as directory:
        path = remote.path
        if content is not None:
            path = os.path.join(directory, os.path.basename(remote.path))
            Path(path).write_bytes(content)
        else:
            _require_same(remote)
        done = simulate_all([path], plan, jobs=1, models=models)
    return replace(
        done,
        traces=tuple(replace(each, trace=remote.name) for each in done.traces),
        results=tuple(replace(each, trace=remote.name) for each in done.results),
        curves=tuple(replace(each, trace=remote.name) for each in done.curves),
    )


def _require_same(remote: Remote) -> None:
    """EnvironmentProblem, naming the worker, if it does not see the file that `remote` stands for."""
    try:
        seen = replace(Remote.of(remote.path), name=remote.name)
        problem = "" if seen == remote else "it has another content there"
    except LlmcacheError as error:
        problem = error.message
    if problem:
        from distributed import get_worker

        raise EnvironmentProblem(
            f"--scheduler: worker {get_worker().address} cannot read '{remote.path}': {problem}",
            f"traces above {SENT_BYTES >> 20} MiB are not sent: put it on storage that all workers see under this path",
        )
