"""The `llmcache run` command: model files in a command, the directory to steer, and the engine's variables."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from llmcache import procfs
from llmcache.errors import LlmcacheError, UsageError
from llmcache.mount.copies import ClientFacts, find_copy
from llmcache.run import models, session
from llmcache.run.child import NOT_EXECUTABLE, NOT_FOUND, Child, NotRunnable, resolve, user_of
from tools.make_model import TYPES, choose_shape, make_model

MB = 1_000_000


def sparse(path: Path, size: int = 20 << 20, head: bytes = b"GGUF") -> Path:
    """Write a file of `size` bytes that starts with `head`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
    return path


def test_model_files_are_recognized_by_their_content(tmp_path: Path) -> None:
    header = (2000).to_bytes(8, "little") + b'{"__metadata__":'
    found = {
        "sha256-abc": sparse(tmp_path / "sha256-abc"),
        "blob": sparse(tmp_path / "blob", head=header),
        "small.gguf": sparse(tmp_path / "small.gguf", 1 << 20),
        "text.gguf": sparse(tmp_path / "text.gguf", head=b"hello"),
        "json": sparse(tmp_path / "json", head=(1 << 40).to_bytes(8, "little") + b"{"),
    }
    assert {name for name, path in found.items() if models.is_model(str(path))} == {"sha256-abc", "blob"}
    assert not models.is_model(str(tmp_path)) and not models.is_model(str(tmp_path / "none"))
    os.mkfifo(tmp_path / "fifo")
    assert not models.is_model(str(tmp_path / "fifo"))


def test_models_are_found_in_arguments_and_variables(tmp_path: Path) -> None:
    one, draft = sparse(tmp_path / "one.gguf"), sparse(tmp_path / "draft.gguf")
    shards = [sparse(tmp_path / f"s/big-0000{number}-of-00003.gguf") for number in (1, 2, 3)]
    sparse(tmp_path / "s/big-extra.gguf")
    hub = [sparse(tmp_path / f"hub/part{number}") for number in (1, 2)]

    def given(*words: str, **variables: str) -> list[str]:
        return models.in_words(words, variables, str(tmp_path))

    assert given("llama-server", "-m", "one.gguf", "-c", "8192") == [str(one)]
    assert given(f"--model={one}", "--model-draft", str(draft)) == [str(one), str(draft)]
    assert given("-m", str(shards[1])) == list(map(str, shards))
    assert given("generate.py", "hub") == list(map(str, hub))
    assert given("llama-server", LLAMA_ARG_MODEL=str(one)) == [str(one)]
    assert given("-p", "Hello", "", "--flag=", "no\0path") == []


def test_directories_are_searched_and_each_file_is_found_once(tmp_path: Path) -> None:
    blob = sparse(tmp_path / f"hub/models--a--b/blobs/{'0' * 64}")
    for revision in "12":
        snapshot = tmp_path / f"hub/models--a--b/snapshots/{revision}/model.safetensors"
        snapshot.parent.mkdir(parents=True)
        snapshot.symlink_to(f"../../blobs/{blob.name}")
    deep = sparse(tmp_path / "hub/1/2/3/4/5/model.gguf")
    assert models.in_words(["hub"], {}, str(tmp_path), models.DEPTH) == [str(blob)]
    assert models.in_words(["hub/1"], {}, str(tmp_path), models.DEPTH) == [str(deep)]
    assert models.in_words(["hub"], {}, str(tmp_path)) == []


def test_the_directory_that_names_a_blob_is_steered(tmp_path: Path) -> None:
    name = "0" * 64
    blob = sparse(tmp_path / f"hub/models--a--b/blobs/{name}")
    snapshot = tmp_path / "hub/models--a--b/snapshots/1/model.safetensors"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(f"../../blobs/{name}")
    ollama = sparse(tmp_path / f"ollama/blobs/sha256-{name}")
    (tmp_path / "ollama/manifests").mkdir()
    plain = sparse(tmp_path / "plain/blobs/model.gguf")
    of = models.source_of
    assert of(str(blob)) == of(str(snapshot)) == str(tmp_path / "hub/models--a--b")
    assert of(str(ollama)) == str(tmp_path / "ollama") and of(str(plain)) == str(plain.parent)
    (tmp_path / "links").mkdir()
    for file in (plain, blob, ollama):
        (tmp_path / "links" / file.name).symlink_to(file)
        assert of(str(tmp_path / "links" / file.name)) == of(str(file)), "a mount of the links would not contain the file"
    nested = sparse(tmp_path / "plain/blobs/more/model.gguf")
    assert models.sources_of([str(plain), str(nested)]) == [str(plain.parent)]


@pytest.mark.parametrize(
    ("room_mb", "words", "variables", "expected"),
    [
        (40, [], {}, {"LLAMA_ARG_NO_REPACK": "1"}),
        (80, [], {}, {}),  # the copy fits, and repacked weights are faster
        (40, ["--repack"], {}, {}),
        (40, ["-nr"], {}, {}),
        (40, [], {"LLAMA_ARG_REPACK": "1"}, {}),
    ],
)
def test_repacking_is_disabled_if_the_copy_does_not_fit(
    tmp_path: Path, room_mb: int, words: list[str], variables: dict[str, str], expected: dict[str, str]
) -> None:
    path = tmp_path / "model.gguf"
    make_model(path, choose_shape(60 * MB, TYPES["q4_k_m"].mean_value_bytes, None, False), "gguf", 1, 0, file_type="q4_k_m")
    found = session.engine_variables([str(path)], ["llama-server", *words], variables, room_mb * MB)
    assert found == expected


@pytest.mark.parametrize(
    ("client", "cause"),
    [
        (ClientFacts(1, "llama-server", 750 * MB, 1000 * MB), "repacking"),
        (ClientFacts(1, "llama-server", 200 * MB, 1000 * MB), None),  # a KV cache
        (ClientFacts(1, "llama-server", 1100 * MB, 0), "no-mmap"),
        (ClientFacts(1, "llama-server", 1100 * MB, 0, has_direct=True), "direct-io"),
        (ClientFacts(1, "llama-server", 200 * MB, 1000 * MB, has_gpu=True), "gpu"),
        (ClientFacts(1, "llama-server", 200 * MB, 1000 * MB, locked_bytes=1000 * MB), "mlock"),
        (ClientFacts(1, "cat", 1 * MB, 0), None),
    ],
)
def test_copies_are_detected_by_private_memory_and_mappings(client: ClientFacts, cause: str | None) -> None:
    found = find_copy(client, 1000 * MB, 700 * MB)
    assert (found.cause if found else None) == cause
    if found:
        assert found.remedy in str(found) and "llama-server (1)" in str(found)


def test_commands_that_cannot_be_run_have_their_exit_codes(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("x")
    for command, code in (
        ("nosuch-program", NOT_FOUND),
        (str(tmp_path / "none"), NOT_FOUND),
        (str(plain), NOT_EXECUTABLE),
        (str(tmp_path), NOT_EXECUTABLE),
        ("plain", NOT_EXECUTABLE),
    ):
        with pytest.raises(NotRunnable) as raised:
            resolve(command, f"{tmp_path}:/usr/bin")
        assert raised.value.exit_code == code, command
    assert resolve("sh", "/usr/bin:/bin").endswith("/sh")


def test_a_program_without_its_interpreter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_text("#!/nonexistent\n")
    path.chmod(0o755)
    child = Child([str(path)], str(path), {})
    with pytest.raises(NotRunnable, match="its interpreter or loader does not exist") as raised:
        child.release()
    assert raised.value.exit_code == NOT_FOUND


def test_ending_a_released_command_closes_no_descriptor_of_others() -> None:
    child = Child(["sleep", "600"], resolve("sleep", os.environ["PATH"]), os.environ)
    child.release()
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(4)]
    child.cancel()
    assert child.exit_code == -signal.SIGTERM
    for fd in opened:
        os.close(fd)


def test_the_end_of_a_process_wakes_a_waiting_thread() -> None:
    with subprocess.Popen(["sleep", "600"]) as process, procfs.RunningProcesses() as running:
        running.add(process.pid)
        assert running.wait(0) == set() and running.pids == {process.pid} and procfs.is_running(process.pid)
        assert not select.select([running], [], [], 0)[0]
        held = Child(["true"], "/bin/true", {})  # has copies of all descriptors until it executes the program
        process.kill()
        assert select.select([running], [], [], 60)[0]
        assert running.wait(60) == {process.pid} and running.pids == set(), "also while it is a zombie"
        assert not procfs.is_running(process.pid)
        assert running.wait(0) == set()
        held.cancel()


@pytest.mark.parametrize(("state", "text"), [("S (sleeping)", "is a kernel thread"), ("Z (zombie)", "has ended")])
def test_processes_without_memory_are_refused(monkeypatch: pytest.MonkeyPatch, state: str, text: str) -> None:
    monkeypatch.setattr(procfs, "status_of", lambda pid: {"Tgid": str(pid), "Name": "x", "State": state, "Uid": "0 0 0 0"})
    with pytest.raises(LlmcacheError, match=text):
        models.check_process("--pid", 5)


def test_the_user_of_a_command_is_resolved() -> None:
    with pytest.raises(UsageError, match="user 'nosuch-user' does not exist"):
        user_of("nosuch-user", {})
    if os.geteuid() != 0:
        with pytest.raises(UsageError, match="only root"):
            user_of("root", {})
        return
    assert user_of(None, {}) is None and user_of("root", {"SUDO_USER": "nobody"}) is None
    assert user_of(None, {"SUDO_USER": ""}) is None
    with pytest.raises(UsageError, match="SUDO_USER: user '²' does not exist"):
        user_of(None, {"SUDO_USER": "²"})
    sudo = user_of(None, {"SUDO_USER": "nobody"})
    assert sudo is not None and sudo.name == "nobody"
    assert sudo.environment({"HOME": "/root", "PATH": "/bin", "XDG_RUNTIME_DIR": "/run/user/0"})["HOME"] == sudo.home


def test_globs_select_files_by_path_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = sparse(tmp_path / "m/llama.gguf"), sparse(tmp_path / "m/qwen.gguf")
    monkeypatch.chdir(tmp_path)
    wanted = {
        ("m/lla*",): ([str(one)], True, False),
        ("qwen*",): ([], False, True),
        (): ([], True, True),
    }
    for globs, (named, first, second) in wanted.items():
        settings = session.RunSettings(globs=globs)
        assert [str(tmp_path / path) for path in settings.named()] == named
        assert (settings.wants(str(one)), settings.wants(str(other))) == (first, second)
