"""Shell completion: matching words, real shells where installed, no heavy imports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from llmcache.cli import app
from llmcache.cli.mount import command as mount_command
from tests.unit.command_parts import HEAVY, loaded

# The typed words with the word to complete last, the words offered, and whether no others may be offered.
CASES = [
    (("llmcache", "st"), {"stats"}, True),
    (("llmcache", "kv", ""), {"bench", "plot", "profile", "plan", "list", "show", "prune", "proxy"}, True),
    (("llmcache", "help", "st"), {"stats"}, True),
    (("llmcache", "help", "kv", "pl"), {"plot", "plan"}, True),
    (("llmcache", "trace", "--ti"), {"--tier"}, True),
    (("llmcache", "trace", "--tier", ""), {"auto", "filemap", "faults"}, False),
    (("llmcache", "simulate", "x.csv", "--policy", "lru,le"), {"lru,lecar"}, True),
    (("llmcache", "kv", "bench", "--policy", "ic"), {"icecache"}, True),
    (("llmcache", "kv", "bench", "--device", ""), {"csd", "file"}, True),
    (("llmcache", "edram", "sweep", "--system", "Ke"), {"Kelle+eDRAM"}, True),
    (("llmcache", "reproduce", "a"), {"all"}, True),
    (("llmcache", "resize", "/nowhere", "nothing"), set(), True),
    (("llmcachefs", "--mode", ""), {"auto", "inplace", "steer", "arena"}, True),
    (("llmcachefs", "--acc"), {"--access-log"}, True),
]
IN_SHELLS = [case for case in CASES if case[0][-1] in ("st", "lru,le", "nothing", "--acc")]
# bash splits words at equals signs
BROKEN = [
    (("llmcache", "simulate", "x.csv", "--cache", "=", "50%", "--policy", *rest), wanted, alone)
    for rest, wanted, alone in (
        (("=", "lru,le"), {"lru,lecar"}, True),
        (("=",), {"lru", "belady"}, False),
        (("=", "bela"), {"belady"}, True),
    )
]
Cases = list[tuple[tuple[str, ...], set[str], bool]]
BASH = """
eval "$(llmcache completion bash)"
ask() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    "_$1_completion" "$1" 2>/dev/null
    echo "${COMPREPLY[*]}"
}
"""
ZSH = """
compdef() { :; }
compadd() { print -r -- $completions; }
_describe() { for each in $completions_with_descriptions; do print -r -- ${each%%:*}; done; }
eval "$(llmcache completion zsh)"
ask() { words=("$@"); CURRENT=$#; print -r -- $("_$1_completion"); }
"""
FISH = """
llmcache completion fish | source
function ask; echo (complete -C "$argv" | string replace -r '\\t.*' ''); end
"""


def check(offered: Sequence[set[str]], cases: Cases) -> None:
    for (typed, wanted, alone), words in zip(cases, offered, strict=True):
        assert words == wanted if alone else words > wanted, typed


@pytest.mark.parametrize(
    ("shell", "prologue", "cases"),
    [
        pytest.param(["bash", "--norc", "-c"], BASH, IN_SHELLS + BROKEN, marks=pytest.mark.bash),
        pytest.param(["zsh", "-f", "-c"], ZSH, IN_SHELLS[:2], marks=pytest.mark.zsh),
        pytest.param(["fish", "--no-config", "-c"], FISH, IN_SHELLS[:2], marks=pytest.mark.fish),
    ],
    ids=["bash", "zsh", "fish"],
)
def test_shells_offer_matching_words(shell: Sequence[str], prologue: str, cases: Cases, tmp_path: Path) -> None:
    for name, module in (("llmcache", "llmcache.cli"), ("llmcachefs", "llmcache.cli.mount")):
        script = tmp_path / name
        script.write_text(f"#!{sys.executable}\nfrom {module} import main\nmain()\n")
        script.chmod(0o755)
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": root, "HOME": str(tmp_path)}
    lines = [" ".join(["ask", *(f"'{word}'" for word in typed)]) for typed, _, _ in cases]
    command = [*shell, "\n".join([prologue, *lines])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    check([set(line.split()) for line in result.stdout.splitlines()], cases)


def words(args: Sequence[str], incomplete: str, program: str = "llmcache") -> dict[str, str]:
    """Return the values offered and their types, computed in this process."""
    command = mount_command if program == "llmcachefs" else app
    found = ShellComplete(command, {}, program, "X").get_completions(list(args), incomplete)
    return {item.value: item.type for item in found}


def test_matching_words_are_offered() -> None:
    check([set(words(args, word, program)) for (program, *args, word), _, _ in CASES], CASES)


def test_mount_points_of_running_mounts_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcache.mount.client.mountpoint.ours", lambda: ["/mnt/models", "/srv/other"])
    for command in ("stats", "top", "resize", "warmup", "evict", "umount"):
        assert words([command], "/mnt") == {"/mnt/models": "plain"}, command
    assert words(["stats"], "") == {"/mnt/models": "plain", "/srv/other": "plain"}
    assert words(["stats"], "/home") == {"/home": "dir"}


@pytest.mark.parametrize("name", ["a b", "$(reboot)", "`id`", "a\nplain,b", "'", "*"])
def test_mount_points_with_shell_metacharacters_are_not_offered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcache.mount.client.mountpoint.ours", lambda: [f"/tmp/{name}", "/tmp/mnt"])
    assert words(["umount"], "/tmp/") == {"/tmp/mnt": "plain"}


def test_files_and_directories_are_completed_by_the_shell() -> None:
    assert words(["classify"], "run") == {"run": "file"}
    assert words(["trace", "-o"], "x") == {"x": "file"}
    assert words(["kv", "profile"], "/var") == {"/var": "dir"}
    assert words([], "/m", "llmcachefs") == {"/m": "dir"}


def test_completion_imports_no_heavy_package() -> None:
    code = "from click.shell_completion import ShellComplete\nfrom llmcache.cli import app, mount\n"
    code += f"for (program, *args, word), _, _ in {[*CASES, (('llmcache', 'top', ''), set(), True)]}:\n"
    code += "    command = app if program == 'llmcache' else mount.command\n"
    code += "    ShellComplete(command, {}, program, 'X').get_completions(args, word)"
    assert not HEAVY & loaded(code)
