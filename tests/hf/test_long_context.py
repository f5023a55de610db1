"""The example: both caches answer alike, in noise and from a text with a model from a directory."""

import sys
from pathlib import Path

import pytest

from llmcache.errors import DataError, UsageError
from tests.hf.tiny_models import tiny, words
from tools import long_context


def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    monkeypatch.setattr(sys, "argv", ["long_context.py", *arguments])
    assert long_context.main() == 0
    return [line.split(": ", 1) for line in capsys.readouterr().out.splitlines()]


def test_the_recall_model_answers_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = lines(monkeypatch, capsys, "--tokens", "700", "--budget", "96", "--dir", str(tmp_path))
    assert [answer for _, answer in found] == ["100% right", "100% right"]
    assert " 0 B read" in found[0][0]
    assert " 0 B read" not in found[1][0] and " 0 B written" not in found[1][0]
    assert not list(tmp_path.iterdir())


def test_a_model_from_a_directory_is_asked_about_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, said = words()
    tokenizer.save_pretrained(tmp_path / "model")
    tiny("llama").save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(said)
    arguments = [str(tmp_path / "model"), "--text", str(text), "--ask", "w3 w4", "--budget", "512", "--dir", str(tmp_path)]
    found = lines(monkeypatch, capsys, *arguments)
    assert found[0][1] == found[1][1] != ""
    with pytest.raises(UsageError, match="--text, --ask"):
        lines(monkeypatch, capsys, str(tmp_path / "model"))
    with pytest.raises(DataError, match="--text: "):
        lines(monkeypatch, capsys, *(argument + "x" if argument == str(text) else argument for argument in arguments))
