"""The command group: help, versions, errors, and that it stays light."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import click
import pytest
from click.testing import CliRunner

from llmcache import __version__, cli
from llmcache.cli.mount import command as mount_command


def _run(*args: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "llmcache"]
    return subprocess.run([*command, *args], capture_output=True, text=True, timeout=120, check=False)


def _exit_code(command: click.Command, args: Sequence[str] = ()) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.run(command, "llmcache", args)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_lists_every_command_with_examples_and_exit_codes() -> None:
    result = _run("--help")
    assert result.returncode == 0
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in result.stdout and summary.split(";")[0].split(".")[0] in result.stdout
    assert "llmcachefs ~/models /mnt/models" in result.stdout
    assert "Exit codes: 0" in result.stdout
    assert _run().stdout == result.stdout, "the same without a command"


def test_version() -> None:
    assert _run("--version").stdout == f"llmcache, version {__version__}\n"


@pytest.mark.parametrize("args", [("bogus",), ("--bogus",), ("mount", "--bogus")])
def test_usage_errors_have_code_2_and_name_the_help(args: tuple[str, ...]) -> None:
    result = _run(*args)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("llmcache: error: ")
    assert "\nhint: 'llmcache" in result.stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("llmcache stat /mnt", "stats"),
        ("llmcache unmount /mnt", "umount"),
        ("llmcache kv bnch", "bench"),
        ("llmcache help clasify", "classify"),
        ("llmcache stats --jsn", "--json"),
        ("llmcachefs --cach 6G", "--cache"),
    ],
)
def test_what_is_mistyped_is_guessed(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *args = words.split()
    with pytest.raises(SystemExit) as caught:
        cli.run(mount_command if program == "llmcachefs" else cli.app, program, args)
    said = capsys.readouterr().err.splitlines()[0]
    assert caught.value.code == 2 and "Did you mean" in said and meant in said.partition("Did you mean")[2]


@pytest.mark.parametrize("words", ["", "stats", "kv", "kv bench", "help"])
def test_help_is_a_command_too(words: str) -> None:
    result = CliRunner().invoke(cli.app, ["help", *words.split()], prog_name="llmcache")
    assert result.exit_code == 0, result.output
    assert result.output == CliRunner().invoke(cli.app, [*words.split(), "--help"], prog_name="llmcache").output


def test_help_of_what_is_no_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(cli.app, ["help", "stats", "all"]) == 2
    assert "llmcache stats has no commands below it: 'all'" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_with_code_0() -> None:
    code = "import click, time; from llmcache import cli\n"
    code += "cli.run(click.Command('x', callback=lambda: (print('ready', flush=True), time.sleep(600))), 'x', [])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


@pytest.mark.parametrize("say", ["click.echo", "rich.print"])
def test_a_reader_that_goes_away_is_no_failure(say: str) -> None:
    code = "import click, rich; from llmcache import cli\n"
    code += f"cli.run(click.Command('x', callback=lambda: [{say}('line' * 99) for _ in range(9999)]), 'x', [])"
    read_end, write_end = os.pipe()
    with subprocess.Popen([sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE, text=True) as process:
        os.close(write_end)
        time.sleep(0.1)
        os.close(read_end)
        assert process.wait(120) == 0
        assert process.stderr is not None and process.stderr.read() == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_without_our_letters_gets_others(encoding: str) -> None:
    code = "import click; from llmcache import cli\n"
    code += "cli.run(click.Command('x', callback=lambda: print('3 \\u2588')), 'x', [])"
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, check=True
    )
    assert result.stdout.decode(encoding) == ("3 \u2588\n" if encoding == "utf-8" else "3 ?\n")


def test_a_pipe_that_breaks_elsewhere_is_not_hidden() -> None:
    code = "import click; from llmcache import cli\n"
    code += "def broken(): raise BrokenPipeError('the socket of a daemon')\n"
    code += "cli.run(click.Command('x', callback=broken), 'x', [])"
    result = _run(code=code)
    assert result.returncode == 1
    assert "the socket of a daemon" in result.stderr
