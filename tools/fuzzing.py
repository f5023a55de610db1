#!/usr/bin/env python3
"""Runs fuzz targets for a long time. `tools/fuzz` sets up the environment and documents the options.

A round is a few hundred inputs from hypothesis with one seed. Each failure is reported with its seed, and the same seed
gives the same inputs. Every input is written to a file before it is tried, so that it is not lost if the process dies.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

# Python searches the directory of a script for modules, not the repository above it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from llmcache.errors import UsageError, run_cli
from tests.fuzz.target import Machine, Target

MODULES = (
    *(f"tests.fuzz.test_{name}" for name in ("gguf", "safetensors", "trace", "spill", "spill_index", "prompt_blocks")),
    *(f"tests.fuzz.test_{name}" for name in ("spill_operations", "control", "settings", "names")),
    "tests.mount.test_fsx",
)
ROUND = 300
MACHINE_ROUND = 20
STEPS = 60
HANG_S = 30


_ended = threading.Event()


def _end(_number: int, _frame: FrameType | None) -> None:
    """End the run before its next input; end at once on a second signal.

    Raising at any point would be unsafe: an exception is lost during garbage collection, and breaks the state of hypothesis.
    """
    if _ended.is_set():
        raise KeyboardInterrupt
    _ended.set()


def _check_ended() -> None:
    """Raise KeyboardInterrupt after a signal, so that mounts are unmounted as on Ctrl-C."""
    if _ended.is_set():
        raise KeyboardInterrupt


class Hang(AssertionError):
    """An input takes longer than HANG_S."""


def _hang(_number: int, _frame: FrameType | None) -> None:
    raise Hang(f"more than {HANG_S} s")


def targets() -> dict[str, Target | Machine]:
    modules = [importlib.import_module(name) for name in MODULES]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Target | Machine)]
    return {target.name: target for target in found}


@dataclass
class FuzzRun:
    """The outcome of a target; `failure`: the file of the failing input, and the command that tries it again."""

    name: str
    inputs: int
    seconds: float
    failure: tuple[Path, str] | None = None

    def __str__(self) -> str:
        summary = f"{self.name}: {self.inputs} inputs in {self.seconds:.0f} s"
        if self.failure is None:
            return f"{summary}, none failed"
        file, again = self.failure
        return f"{summary}; FAILED: {file}\n    {again}"


def run_target(target: Target, seconds: float, first_seed: int, out: Path) -> FuzzRun:
    """Try new inputs for `seconds`, for at least one round, until one fails; shrink it and keep it in `out`."""
    began, tried = time.monotonic(), 0
    current = out / f"fuzz-{target.name}.current"
    last = b""

    def attempt(data: bytes) -> None:
        nonlocal tried, last
        _check_ended()
        tried += 1
        last = data
        current.write_bytes(data)
        signal.setitimer(signal.ITIMER_REAL, HANG_S)
        try:
            target.check(data)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    with target.around():
        number = first_seed
        while number == first_seed or time.monotonic() - began < seconds:
            try:
                seed(number)(_settings(ROUND)(given(target.inputs)(attempt)))()
            except Exception:  # noqa: BLE001 - any exception of a parser is a finding
                file = _keep(out, target.name, last, traceback.format_exc())
                again = f"tools/fuzz {target.name} --input {file}"
                return FuzzRun(target.name, tried, time.monotonic() - began, (file, again))
            number += 1
    current.unlink(missing_ok=True)
    return FuzzRun(target.name, tried, time.monotonic() - began)


def run_machine(machine: Machine, seconds: float, first_seed: int, out: Path) -> FuzzRun:
    """Run sequences of operations like `run_target`. A failure is repeated by its seed."""
    began, number = time.monotonic(), first_seed

    def begin() -> Any:
        _check_ended()
        return machine.operations()

    with machine.around():
        while number == first_seed or time.monotonic() - began < seconds:
            try:
                limits = settings(_settings(MACHINE_ROUND), stateful_step_count=STEPS)
                run_state_machine_as_test(seed(number)(begin), settings=limits)  # type: ignore[arg-type]  # only called
            except Exception:  # noqa: BLE001 - as above
                failure = f"seed {number}\n\n{traceback.format_exc()}"
                file = _keep(out, machine.name, failure.encode(), failure)
                again = f"tools/fuzz {machine.name} --seed {number}"
                tried = (number - first_seed + 1) * MACHINE_ROUND
                return FuzzRun(machine.name, tried, time.monotonic() - began, (file, again))
            number += 1
    return FuzzRun(machine.name, (number - first_seed) * MACHINE_ROUND, time.monotonic() - began)


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.target, Phase.shrink), derandomize=False,
    )  # fmt: skip


def _keep(out: Path, name: str, data: bytes, error: str) -> Path:
    file = out / f"fuzz-{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    file.write_bytes(data)
    print(error, file=sys.stderr)
    return file


def repeat(target: Target | Machine, file: Path) -> None:
    """Try the input in `file` once; a failing input raises its exception."""
    if isinstance(target, Machine):
        raise UsageError(f"--input: {target.name} runs operations and has no inputs", "use --seed with the seed in the file")
    with target.around():
        target.check(file.read_bytes())


def fuzz(arguments: argparse.Namespace) -> int:
    known = targets()
    if arguments.list:
        print("\n".join(known))
        return 0
    if unknown := set(arguments.targets) - set(known):
        raise UsageError(f"TARGET: there is no target '{min(unknown)}'", f"one of: {', '.join(known)}")
    chosen = [known[name] for name in arguments.targets or known]
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _hang)
    if arguments.input is not None:
        for target in chosen:
            repeat(target, arguments.input)
            print(f"{target.name}: {arguments.input} does not fail")
        return 0
    runs = []
    for target in chosen:
        print(f"{target.name}: {arguments.seconds:g} s", file=sys.stderr)
        limits = (arguments.seconds, arguments.seed, arguments.out)
        runs.append(run_machine(target, *limits) if isinstance(target, Machine) else run_target(target, *limits))
        print(runs[-1])
    return int(any(run.failure for run in runs))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration for each target (default: 60)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the first round (default: the time)")
    parser.add_argument("--input", type=Path, help="try this file once")
    parser.add_argument("--out", type=Path, default=Path(), help="directory for failing inputs (default: the current one)")
    parser.add_argument("--list", action="store_true", help="print the names of the targets")
    arguments = parser.parse_args(words)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    return fuzz(arguments)


if __name__ == "__main__":
    sys.exit(run_cli(main))
