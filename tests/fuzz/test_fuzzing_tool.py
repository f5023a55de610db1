"""Long runs of tools/fuzz: a failing input is shrunk and saved, and repeating it fails again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from llmcache.errors import EXIT_INTERRUPTED, UsageError
from tests.fuzz.target import Machine, Target
from tools import fuzzing

ROOT = Path(__file__).resolve().parents[2]
# A target that needs cleanup, like the mounts of fsx-steer.
ENDLESS = """
import contextlib, os, signal, sys
from hypothesis import strategies as st
from llmcache.errors import run_cli
from tests.fuzz.target import Target
from tools import fuzzing
@contextlib.contextmanager
def closing():
    with contextlib.ExitStack() as stack:
        stack.callback(print, "down", flush=True)
        print("up", flush=True)
        yield
class Garbage:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        str(self)  # the signal's exception is raised here, and lost
fuzzing.targets = lambda: {"endless": Target("endless", st.binary(), lambda data: str(Garbage()), closing)}
sys.exit(run_cli(lambda: fuzzing.main(["endless", "--out", sys.argv[1]])))
"""


def refuse_long(data: bytes) -> None:
    if len(data) > 2:
        raise RecursionError("too deep")


class Counting(RuleBasedStateMachine):
    """Fails at the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @rule()
    def step(self) -> None:
        self.count += 1
        assert self.count < 3


def test_a_failing_input_is_shrunk_and_saved(tmp_path: Path) -> None:
    target = Target("long", st.binary(max_size=50), refuse_long)
    run = fuzzing.run_target(target, 60, 1, tmp_path)
    assert run.failure is not None
    file, command = run.failure
    assert file.read_bytes() == b"\0\0\0" and command == f"tools/fuzz long --input {file}"
    with pytest.raises(RecursionError):
        fuzzing.repeat(target, file)


def test_failing_operations_are_saved_with_their_seed(tmp_path: Path) -> None:
    machine = Machine("counting", Counting)
    run = fuzzing.run_machine(machine, 60, 7, tmp_path)
    assert run.failure is not None
    file, command = run.failure
    assert command == "tools/fuzz counting --seed 7"
    assert file.read_text().startswith("seed 7\n") and file.read_text().count("state.step()") == 3
    with pytest.raises(UsageError):
        fuzzing.repeat(machine, file)


def test_names_of_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzzing.main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert {"gguf", "safetensors", "parquet", "recording", "spill", "control-lines", "spill-operations"} <= set(names)
    with pytest.raises(UsageError, match="no target 'nonsense'"):
        fuzzing.main(["nonsense"])


def test_a_terminated_run_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert process.communicate(timeout=240)[0] == "down\n"  # without the output of a complete run
    assert process.returncode == EXIT_INTERRUPTED
