"""Errors become messages and exit codes, the same for every command."""

import sys
from collections.abc import Callable

import pytest

from llmcache.errors import DataError, EnvironmentProblem, LlmcacheError, MountProblem, UsageError, run_cli


def _raising(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("kind", "code"),
    [(UsageError, 2), (EnvironmentProblem, 3), (MountProblem, 4), (DataError, 5)],
)
def test_each_error_has_its_exit_code_and_prints_message_and_hint(
    kind: type[LlmcacheError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(_raising(kind("it broke", "mend it"))) == code
    assert capsys.readouterr() == ("", "llmcache: error: it broke\nhint: mend it\n")


def test_what_others_say_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages quote daemons of other users, names of mount points and of files."""
    assert run_cli(_raising(MountProblem("\x1b]0;title\x07\nhint: \udcff é", "\r\x9b2J"))) == 4
    assert capsys.readouterr().err == "llmcache: error: \\x1b]0;title\\x07\\nhint: \\xff é\nhint: \\r\\x9b2J\n"


@pytest.mark.parametrize(
    ("error", "code", "said"), [(MountProblem("it broke"), 4, "llmcache: error: it broke\n"), (KeyboardInterrupt(), 0, "")]
)
def test_no_hint_and_ctrl_c(error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(_raising(error)) == code
    assert capsys.readouterr() == ("", said)


def test_anything_unexpected_is_a_bug_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(_raising(ZeroDivisionError("oh"))) == 1
    assert "ZeroDivisionError: oh" in capsys.readouterr().err


def test_the_code_of_the_command_is_kept() -> None:
    assert run_cli(lambda: 7) == 7
    with pytest.raises(SystemExit, match="9"):
        run_cli(lambda: sys.exit(9))
