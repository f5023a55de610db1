"""Test tiers: a test that this machine cannot run is skipped with the reason, or fails where its tier is required.

Tiers are markers: mount, llama, transformers, cgroup, bpf. LLMCACHE_REQUIRE_TIERS=mount,llama turns a skip in those tiers
into a failure.
"""

from __future__ import annotations

import ctypes.util
import functools
import importlib.util
import os
import shutil
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

CGROUPS = Path("/sys/fs/cgroup")

# No property has a deadline, nor must its examples be made in a certain time: machines are shared. CI tries the same
# examples in every run of the same tests, so that what fails there is the change; new ones are tried everywhere else.
settings.register_profile("llmcache", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("llmcache-ci", settings.get_profile("llmcache"), derandomize=True, print_blob=True)
settings.load_profile("llmcache-ci" if os.environ.get("LLMCACHE_CI") == "1" else "llmcache")


def _mount_problem() -> str | None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    if ctypes.util.find_library("fuse3") is None:
        return "libfuse 3 is not installed (apt-get install fuse3)"
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed (apt-get install fuse3)"
    return None if importlib.util.find_spec("mfusepy") else "mfusepy is not installed"


def _llama_problem() -> str | None:
    missing = [name for name in ("llama_cpp", "gguf", "numpy") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)} (the [llama] extra)" if missing else None


def _transformers_problem() -> str | None:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)} (the [transformers] extra)" if missing else None


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
    from llmcache.trace.sources.bpf import FilemapSource

    return FilemapSource.probe()


PROBLEMS: dict[str, Callable[[], str | None]] = {
    "mount": functools.cache(_mount_problem),
    "llama": functools.cache(_llama_problem),
    "transformers": functools.cache(_transformers_problem),
    "cgroup": functools.cache(_cgroup_problem),
    "bpf": functools.cache(_bpf_problem),
}


def _required() -> set[str]:
    return {tier.strip() for tier in os.environ.get("LLMCACHE_REQUIRE_TIERS", "").split(",") if tier.strip()}


def _tiers(item: pytest.Item) -> set[str]:
    return {tier for tier in PROBLEMS if item.get_closest_marker(tier)}


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a tier that does not exist, as a mistyped one would require nothing; keep the tests' files on a disk.

    /tmp is a tmpfs on many machines: nothing there can be throttled, and its pages are memory of whoever wrote them.
    What nohup, or a shell in the background, ignores for us is not ignored by the programs that tests send signals to.
    A run that is told to end ends in order: mounts, cgroups and small disks of a test do not outlive it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        is_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        signal.signal(number, (lambda *_: None) if is_nohup else signal.default_int_handler)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", os.environ.get("LLMCACHE_TEST_DISK", "/var/tmp"))
    if unknown := _required() - set(PROBLEMS):
        raise pytest.UsageError(f"LLMCACHE_REQUIRE_TIERS: no such tier: {', '.join(sorted(unknown))}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in tests/mount is of the mount tier, everything in tests/hf of the transformers tier."""
    for item in items:
        directories = item.path.relative_to(Path(__file__).parent).parts[:-1]
        for directory, tier in (("mount", "mount"), ("hf", "transformers")):
            if directory in directories:
                item.add_marker(tier)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose tier has a problem; the report below decides whether that is a failure."""
    for tier in sorted(_tiers(item)):
        if problem := PROBLEMS[tier]():
            pytest.skip(f"{tier}: {problem}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn skips (also those a test or fixture decides on) in required tiers into failures."""
    report = yield
    required = _tiers(item) & _required()
    if report.skipped and required and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{', '.join(sorted(required))} is required (LLMCACHE_REQUIRE_TIERS), but: {reason}"
    return report
