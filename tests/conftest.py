"""Test tiers: skip the tests that this machine cannot run, with the reason, or fail them if their tier is required.

Tiers are markers: mount, llama, stock, server, redis, transformers, models, cgroup, bpf, filemap, fexit, resource, and
the names of a model (gemma) and of programs (clang, zsh) that a test runs. The last line of the output lists the missing
tiers and how to install each. LLMCACHE_REQUIRE_TIERS=mount,llama turns a skip in those tiers into a failure.
"""

from __future__ import annotations

import ctypes.util
import functools
import importlib.util
import os
import shutil
import signal
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tools.bench.clients.server_tokens import SITE
from tools.bench.harness import MODELS

CGROUPS = Path("/sys/fs/cgroup")

# Two tests run at a time: spinning threads of torch and BLAS would take processor time from the other test.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# xdist sets COLUMNS in its workers. Rich would then wrap output differently, depending on the number of workers.
os.environ.pop("COLUMNS", None)

# No deadlines and no health check for slow examples, because machines are shared. Every run tries the same examples, so a
# new failure comes from the change under test. `--hypothesis-profile=fresh` tries new ones; add those that fail as
# explicit examples.
settings.register_profile("fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("same", settings.get_profile("fresh"), derandomize=True, database=None, max_examples=50)
if settings.get_current_profile_name() not in ("same", "fresh"):  # tests import this file a second time, as a module
    settings.load_profile("same")


def examples(count: int) -> int:
    """Return how many of `count` examples to run: half if derandomized, because repeated runs find nothing new."""
    return max(1, count // 2) if settings().derandomize else count


SMOLLM2 = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = MODELS / "gemma-3-270m-q4_k_m.gguf"


def redis_server() -> str | None:
    """Return the path of a Redis-compatible server. Debian's redis-tools ships the server as redis-check-rdb."""
    return next(
        (found for name in ("valkey-server", "redis-server", "redis-check-rdb") if (found := shutil.which(name))), None
    )


def _redis_problem() -> str | None:
    if importlib.util.find_spec("redis") is None:
        return "not installed: redis (Python)"
    return None if redis_server() else "neither valkey-server nor redis-server is installed"


def _cgroup_problem() -> str | None:
    if os.geteuid() != 0:
        return "cgroups can be made by root only"
    version_1 = CGROUPS / "memory" / "memory.limit_in_bytes"
    controllers = CGROUPS / "cgroup.controllers"
    has_memory = version_1.exists() or (controllers.exists() and "memory" in controllers.read_text().split())
    if not has_memory:
        return "no memory controller below /sys/fs/cgroup"
    directory = version_1.parent if version_1.exists() else CGROUPS
    return None if os.access(directory, os.W_OK) else f"{directory} is read-only"


def _bpf_problem() -> str | None:
    from llmcache.mount.backends.touches import why_not

    return why_not()


def _filemap_problem() -> str | None:
    from llmcache.trace.kernel import FilemapSource

    return FilemapSource.probe()


def _fexit_problem() -> str | None:
    from llmcache.trace.kernel import FexitSource

    return FexitSource.probe()


def _resource_problem() -> str | None:
    from llmcache.procfs import status_of

    return None if int(status_of()["CapEff"], 16) >> CAP_SYS_RESOURCE & 1 else "no CAP_SYS_RESOURCE"


def _missing(
    *modules: str, programs: Sequence[str] = (), libraries: Sequence[str] = (), files: Sequence[Path] = ()
) -> Callable[[], str | None]:
    """Return a function that names the missing modules, programs, libraries or files, and returns None if all exist."""

    @functools.cache
    def problem() -> str | None:
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        missing += [program for program in programs if shutil.which(program) is None]
        missing += [library for library in libraries if ctypes.util.find_library(library) is None]
        problems = [f"not installed: {', '.join(missing)}"] if missing else []
        return "; ".join([*problems, *(f"{file} does not exist" for file in files if not file.exists())]) or None

    return problem


CAP_SYS_RESOURCE = 24
LLAMA = ("llama_cpp", "gguf")
SERVER = ("fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings")
TORCH = ("torch", "transformers")
INSTALLED = "tools/test installs it"
TIERS: dict[str, tuple[Callable[[], str | None], str]] = {
    "mount": (
        _missing("mfusepy", programs=["fusermount3"], libraries=["fuse3"], files=[Path("/dev/fuse")]),
        "apt-get install fuse3",
    ),
    "llama": (_missing(*LLAMA), INSTALLED),
    "stock": (_missing(files=[SITE / "xllamacpp"]), INSTALLED),
    "server": (_missing(*LLAMA, *SERVER), INSTALLED),
    "redis": (functools.cache(_redis_problem), "apt-get install redis-tools"),
    "gemma": (_missing(*LLAMA, files=[GEMMA]), "tools/test fetches it"),
    "models": (
        _missing(*TORCH, "accelerate", "gguf", files=[SMOLLM2, GEMMA]),
        "tools/test fetches them, and installs what reads them",
    ),
    "transformers": (_missing(*TORCH), INSTALLED),
    "cgroup": (functools.cache(_cgroup_problem), "run as root, where /sys/fs/cgroup can be written"),
    "bpf": (functools.cache(_bpf_problem), "apt-get install libbpf1, and run as root on Linux 6.1 or later"),
    "filemap": (functools.cache(_filemap_problem), "the same on Linux 6.12 or later"),
    "fexit": (functools.cache(_fexit_problem), "a kernel that allows BPF programs at functions, as those of Debian do"),
    "resource": (functools.cache(_resource_problem), "run as root with CAP_SYS_RESOURCE, which containers lack"),
    "clang": (
        _missing(programs=("clang", "llvm-strip"), files=[Path("/usr/include/bpf/bpf_helpers.h")]),
        "apt-get install clang llvm libbpf-dev",
    ),
    **{name: (_missing(programs=[name]), f"apt-get install {name}") for name in ("bash", "zsh", "fish", "mandoc", "groff")},
}
"""For each tier: a function that returns why this machine cannot run it (or None), and how to make it available."""


def _required() -> set[str]:
    return {tier.strip() for tier in os.environ.get("LLMCACHE_REQUIRE_TIERS", "").split(",") if tier.strip()}


def _tiers(item: pytest.Item) -> set[str]:
    return {tier for tier in TIERS if item.get_closest_marker(tier)}


def pytest_configure(config: pytest.Config) -> None:
    """Reject unknown tiers in LLMCACHE_REQUIRE_TIERS, handle signals, and put temporary files on a disk.

    /tmp is a tmpfs on many machines: it cannot be throttled, and its pages count as the writer's memory. Under nohup or
    in the background of a shell, some signals are ignored, and child processes would inherit that; installing handlers
    avoids it. The handlers also end the run in order, so that no mount, cgroup or loop device of a test outlives it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        is_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        signal.signal(number, (lambda *_: None) if is_nohup else signal.default_int_handler)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", os.environ.get("LLMCACHE_TEST_DISK", "/var/tmp"))
    if unknown := _required() - set(TIERS):
        raise pytest.UsageError(f"LLMCACHE_REQUIRE_TIERS: no such tier: {', '.join(sorted(unknown))}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line with the tiers that did not run, and how to make each available."""
    reasons = {str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])}
    absent = [tier for tier in TIERS if any(f"Skipped: {tier}: " in reason for reason in reasons)]
    if absent:
        terminalreporter.write_line("not run here: " + "; ".join(f"{tier} ({TIERS[tier][1]})" for tier in absent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marker mount to tests in tests/mount and transformers to tests in tests/hf; put long tests first."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    for item in items:
        directories = item.path.relative_to(Path(__file__).parent).parts[:-1]
        for directory, tier in (("mount", "mount"), ("hf", "transformers")):
            if directory in directories:
                item.add_marker(tier)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose tier is unavailable; `pytest_runtest_makereport` turns the skip into a failure if required."""
    for tier in sorted(_tiers(item)):
        if problem := TIERS[tier][0]():
            pytest.skip(f"{tier}: {problem}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn skips in required tiers into failures, including skips by a test or fixture itself.

    A test of several tiers stays skipped if the missing tier is not a required one.
    """
    report = yield
    required = _tiers(item) & _required()
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    lacking = {tier for tier in TIERS if reason.startswith(f"Skipped: {tier}: ")}
    if report.skipped and required and lacking <= required and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{', '.join(sorted(required))} is required (LLMCACHE_REQUIRE_TIERS), but: {reason}"
    return report
