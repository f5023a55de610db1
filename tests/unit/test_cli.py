"""The top-level command: help, version, exit codes, error messages and the end of the process."""

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmcache import __version__, cli
from llmcache.cli.mount import command as mount_command
from llmcache.errors import DataError, MissingRequirement, MountProblem, UsageError, run_cli, with_hints
from tests.unit.command_parts import called, ended


def program(callback: str) -> list[str]:
    """Return the command line of a process whose only command evaluates `callback`, a Python expression."""
    code = "import click, rich, time; from llmcache import cli\n"
    return [sys.executable, "-c", f"{code}cli.run(click.Command('x', callback=lambda: {callback}), 'x', [])"]


def test_help_lists_every_command_with_examples_and_exit_codes() -> None:
    shown = called("--help").stdout
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in shown and summary.split(";")[0].split(".")[0] in shown
    assert "llmcachefs ~/models ~/models" in shown and "Exit codes: 0" in shown
    assert called().stdout == shown, "no arguments: the same help"
    assert called("--version").stdout == f"llmcache, version {__version__}\n"


@pytest.mark.parametrize("args", [("bogus",), ("--bogus",), ("mount", "--bogus"), ("help", "bogus")])
def test_usage_errors_have_code_2_and_name_the_help(args: tuple[str, ...]) -> None:
    result = called(*args)
    assert result.returncode == 2
    assert result.stderr.startswith("llmcache: error: ") and "\nhint: 'llmcache" in result.stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("llmcache stat /mnt", "stats"),
        ("llmcache kv bnch", "bench"),
        ("llmcache help clasify", "classify"),
        ("llmcache stats --jsn", "--json"),
        ("llmcachefs --cach 6G", "--cache"),
    ],
)
def test_mistyped_words_get_a_suggestion(words: str, meant: str) -> None:
    name, *args = words.split()
    result = ended(lambda: cli.run(mount_command if name == "llmcachefs" else cli.app, name, args))
    assert result.returncode == 2 and meant in result.stderr.splitlines()[0].partition("Did you mean")[2]


@pytest.mark.parametrize("words", ["", "stats", "kv", "kv bench", "help"])
def test_the_help_command_prints_the_same_as_the_option(words: str) -> None:
    result = CliRunner().invoke(cli.app, ["help", *words.split()], prog_name="llmcache")
    assert result.exit_code == 0, result.output
    assert result.output == CliRunner().invoke(cli.app, [*words.split(), "--help"], prog_name="llmcache").output


@pytest.mark.parametrize(("options", "code"), [("", 0), ("interrupted=130", 130)])
def test_ctrl_c_ends_a_command_with_its_exit_code(options: str, code: int) -> None:
    """Version 1.0 promised 0; commands that are newer return 130."""
    call = "(print('ready', flush=True), time.sleep(600))"
    made = f"base.Command('x', callback=lambda: {call}, {options})"
    command = [
        sys.executable,
        "-c",
        f"import time\nfrom llmcache import cli\nfrom llmcache.cli import base\ncli.run({made}, 'x', [])",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == code


@pytest.mark.parametrize("say", ["click.echo", "rich.print"])
def test_a_closed_pipe_is_not_an_error(say: str) -> None:
    command = program(f"[{say}('line' * 99) for _ in range(9999)]")
    read_end, write_end = os.pipe()
    with subprocess.Popen(command, stdout=write_end, stderr=subprocess.PIPE, text=True) as process:
        os.close(write_end)
        time.sleep(0.1)
        os.close(read_end)
        assert process.wait(120) == 0
        assert process.stderr is not None and process.stderr.read() == ""


@pytest.mark.parametrize("say", ["click.echo", "rich.print"])
def test_a_full_disk_is_reported_as_an_output_error(say: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(program(f"{say}('x')"), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("llmcache: error: cannot write the output: No space left on device\nhint: ")


def test_closed_standard_streams_are_not_an_error() -> None:
    callback = "print('said') if open('/proc/self/comm').fileno() > 2 else 1 / 0"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *program(callback)]
    assert subprocess.run(closed, check=False).returncode == 0


@pytest.mark.parametrize(
    ("encoding", "text", "printed"), [("utf-8:strict", "\\udcff", b"\xff\n"), ("ascii", "3 \\u2588", b"3 ?\n")]
)
def test_names_and_characters_that_the_output_lacks_are_printed(encoding: str, text: str, printed: bytes) -> None:
    """Names that are not UTF-8 are printed byte for byte, and characters that a terminal lacks are replaced."""
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    result = subprocess.run(program(f"print('{text}')"), env=environment, stdout=subprocess.PIPE, check=True)
    assert result.stdout == printed


# Errors

INTERRUPTED = SystemError("what numba says if Ctrl-C comes while it makes an array of a result")
INTERRUPTED.__cause__ = SystemError("and of a function that it calls for that")
INTERRUPTED.__cause__.__cause__ = KeyboardInterrupt()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("it broke", "mend it"), 2, "llmcache: error: it broke\nhint: mend it\n"),
        (MissingRequirement("it broke", "mend it"), 3, "llmcache: error: it broke\nhint: mend it\n"),
        (MountProblem("it broke"), 4, "llmcache: error: it broke\n"),
        (DataError("it broke"), 5, "llmcache: error: it broke\n"),
        (KeyboardInterrupt(), 130, ""),
        (INTERRUPTED, 130, ""),
        (SystemExit(9), 9, ""),
        # Messages may quote daemons of other users, mount points and file names; control characters in them are escaped.
        (
            MountProblem("\x1b]0;title\x07\nhint: \udcff é", "\r\x9b2J"),
            4,
            "llmcache: error: \\x1b]0;title\\x07\\nhint: \\xff é\nhint: \\r\\x9b2J\n",
        ),
    ],
)
def test_errors_have_their_exit_codes_and_print_message_and_hint(error: BaseException, code: int, said: str) -> None:
    def command() -> int:
        raise error

    result = ended(lambda: sys.exit(run_cli(command)))
    assert (result.returncode, result.stdout, result.stderr) == (code, "", said)


def test_an_unexpected_exception_prints_its_traceback_and_exits_with_1() -> None:
    result = ended(lambda: sys.exit(run_cli(lambda: 1 // 0)))
    assert result.returncode == 1 and "ZeroDivisionError" in result.stderr
    assert run_cli(lambda: 7) == 7, "the command's own exit code is kept"


# Temporary files: gigabytes in some commands


def until_it_spills(process: subprocess.Popen[bytes], directory: Path) -> None:
    end = time.monotonic() + 120
    while not any(path.suffix == ".kv" for path in directory.rglob("*")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        (("bench", "--context", "64k", "--policy", "hillinfer", "--path"), signal.SIGTERM, 143),
        (("profile",), signal.SIGHUP, 129),
    ],
)
def test_temporary_files_are_removed_when_a_signal_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started = [sys.executable, "-m", "llmcache", "kv", *command, str(spill)]
    with subprocess.Popen(started, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        until_it_spills(process, spill)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == code and b"Traceback" not in errors, errors
    assert not list(spill.iterdir())


def test_python_tracebacks_show_the_hint() -> None:
    error = DataError("a.gguf: damaged", "download it again")
    shown = "".join(traceback.format_exception(error))
    assert sys.version_info < (3, 11) or shown.endswith("DataError: a.gguf: damaged\nhint: download it again\n")
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.hint) == ("a.gguf: damaged", "download it again")
    assert "hint" not in "".join(traceback.format_exception(DataError("a.gguf: damaged")))


def test_the_exception_hook_for_python_3_10_prints_the_hint(capsys: pytest.CaptureFixture[str]) -> None:
    """Only Python 3.10 needs the hook, because it has no exception notes; the test runs on every version."""
    passed_on: list[BaseException] = []
    hook = with_hints(lambda _kind, error, _trace: passed_on.append(error))
    for error in (DataError("damaged", "download it again"), DataError("damaged"), ValueError("damaged")):
        hook(type(error), error, None)
    assert len(passed_on) == 3 and capsys.readouterr().err == "hint: download it again\n"
