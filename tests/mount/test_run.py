"""`llmcache run` with real commands: in place for root, over FUSE for ordinary users, and when either process ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcache.memory import cgroup_version
from llmcache.mount.backends.touches import why_not
from llmcache.mount.client import control, mountpoint
from llmcache.procfs import mounts
from tests.mount.live import llmcache, wait_for
from tests.mount.test_lifecycle import NOBODY, copy_packages, python_for_nobody
from tools.bench.runner import forget
from tools.bench.sides import environment
from tools.make_model import BYTES_PER_VALUE, choose_shape, make_model

SIZE = 40_000_000
READER = """
import hashlib, sys, time
print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest(), flush=True)
for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 0):
    open(sys.argv[1], 'rb').read()
    time.sleep(.1)
"""
# Denies new namespaces to a program, as AppArmor does on Ubuntu. Root installs the filter, so it does not block setuid.
NO_NAMESPACES = """
import ctypes, os, struct, sys
number = {"x86_64": 272, "aarch64": 97}[os.uname().machine]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
if ctypes.CDLL(None, use_errno=True).prctl(22, 2, ctypes.byref(Filter(len(steps), ctypes.addressof(code))), 0, 0):
    sys.exit("the filter is refused")
os.execvp(sys.argv[1], sys.argv[1:])
"""

needs_in_place = pytest.mark.skipif(why_not() is not None, reason=f"mode inplace: {why_not()}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GGUF model, alone in its directory."""
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    make_model(path, choose_shape(SIZE, BYTES_PER_VALUE["gguf"], None, False), "gguf", 1, 0)
    return path


@pytest.fixture(scope="module")
def digest(model: Path) -> str:
    """The output of READER for the model."""
    return subprocess.run([sys.executable, "-c", READER, model], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(autouse=True)
def nothing_left(model: Path) -> Iterator[None]:
    """Check after each test that the model's directory is neither steered nor a mount point."""
    yield
    wait_for(lambda: not is_steered(model.parent), "steering has ended")
    assert mountpoint.find(str(model.parent)) is None


def is_steered(directory: Path) -> bool:
    return control.is_locked(control.files(str(directory)))


@contextlib.contextmanager
def running(*words: str | Path, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Start `llmcache run WORDS` in its own process group; kill it at the end if it still runs."""
    command = [sys.executable, "-m", "llmcache", "run", *map(str, words)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes, **more)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def stderr_line(process: subprocess.Popen[str], text: str) -> str:
    """Return the line of stderr with `text`, read from a running process."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"stderr never contains {text!r}")


@needs_in_place
def test_root_steers_in_place_and_gets_the_exit_code_of_the_command(model: Path, digest: str) -> None:
    forget(model.parent)
    done = llmcache("run", "--", sys.executable, "-c", READER + "sys.exit(7)", model)
    assert done.returncode == 7
    assert done.stdout.split()[0] == digest
    assert f"llmcache: steering {model.name} (" in done.stderr and " in place, budget " in done.stderr
    assert f"llmcache: {model.parent}: " in done.stderr and "read from storage" in done.stderr


@needs_in_place
def test_a_model_that_the_command_opens_later_is_steered(model: Path, digest: str) -> None:
    code = f"import sys, time; sys.argv[1:] = ['{model}', '40']; file = open(sys.argv[1], 'rb'); time.sleep(3)" + READER
    with running("--", sys.executable, "-c", code) as process:
        assert "in place" in stderr_line(process, "steering model.gguf")
        out, _ = process.communicate(timeout=60)
        assert out.split()[0] == digest and process.returncode == 0


@needs_in_place
def test_signals_reach_the_command(model: Path) -> None:
    trap = "trap 'echo term; exit 5' TERM; trap 'echo hup' HUP; echo ready; while :; do sleep .1; done"
    with running("--", "sh", "-c", trap, "sh", model) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "hup\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert (out, process.returncode) == ("term\n", 5)
    with running("--", "sh", "-c", "trap 'exit 9' INT; echo ready; while :; do sleep .1; done") as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)  # as a supervisor does
        process.communicate(timeout=60)
        assert process.returncode == 9
    with running("--", "sh", "-c", "kill -KILL $$") as process:
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL


@needs_in_place
@pytest.mark.parametrize("victim", ["run", "daemon"])
def test_the_command_survives_the_death_of_run_and_of_its_daemon(model: Path, digest: str, victim: str) -> None:
    with running("--", sys.executable, "-c", READER, model, "20") as process:
        assert process.stdout is not None and process.stdout.readline().strip() == digest
        (child,) = children_of(process.pid)
        daemon = control.daemon_pid(str(model.parent))
        assert daemon is not None
        os.kill(process.pid if victim == "run" else daemon, signal.SIGKILL)
        if victim == "run":
            wait_for(lambda: not is_steered(model.parent), "the daemon ends with run")
            assert Path(f"/proc/{child}").exists(), "the command continues"
            wait_for(lambda: not Path(f"/proc/{child}").exists(), "the command ends by itself")
        else:
            assert "its daemon has ended" in stderr_line(process, "is no longer steered")
            process.communicate(timeout=60)
            assert process.returncode == 0
            assert not os.path.exists(control.files(str(model.parent)).info), "nothing of the daemon is left"


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@needs_in_place
def test_two_runs_on_one_model(model: Path) -> None:
    with running("--", sys.executable, "-c", READER, model, "40") as first:
        stderr_line(first, "steering model.gguf")
        with running("--", sys.executable, "-c", READER, model, "100") as second:
            assert "already steered by the mount on" in stderr_line(second, "model.gguf")
            first.communicate(timeout=60)
            assert first.returncode == 0
            assert "in place" in stderr_line(second, "steering model.gguf"), "the second takes over"


@needs_in_place
def test_a_model_on_an_in_place_mount_is_steered_already(model: Path, tmp_path: Path) -> None:
    assert llmcache("mount", model.parent, tmp_path, "--mode", "inplace", "--cache", "16Mi").returncode == 0
    try:
        done = llmcache("run", "--", "wc", "-c", tmp_path / model.name)
        assert done.returncode == 0 and f"already steered by the mount on {tmp_path}" in done.stderr, done.stderr
    finally:
        llmcache("umount", tmp_path)


@needs_in_place
def test_a_model_removed_while_its_mount_ends(model: Path) -> None:
    with running("--", sys.executable, "-c", READER, model, "40") as first:
        stderr_line(first, "steering model.gguf")
        path = model.parent / "removed.gguf"
        shutil.copy(model, path)
        code = "import sys, time; file = open(sys.argv[1]); print('opened', flush=True); time.sleep(8); sys.exit(5)"
        with running("--", sys.executable, "-c", code, path) as second:
            stderr_line(second, "already steered by the mount on")
            assert second.stdout is not None and second.stdout.readline() == "opened\n"
            path.unlink()
            first.kill()
            stderr_line(second, "the mount on")
            _, errors = second.communicate(timeout=60)
            assert second.returncode == 5, errors


@needs_in_place
def test_ctrl_c_while_the_daemon_starts_reaches_only_the_command(model: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); file = open(sys.argv[1] + '.gguf')"
        "; print('opened', flush=True); time.sleep(4); sys.exit(5)"
    )
    with running("--", sys.executable, "-c", code, model.with_suffix("")) as process:
        assert process.stdout is not None and process.stdout.readline() == "opened\n"
        for _ in range(15):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.1)
        assert "in place" in stderr_line(process, "steering model.gguf")
        process.communicate(timeout=60)
        assert process.returncode == 5


@needs_in_place
def test_ctrl_c_before_the_command_starts_is_reported(model: Path) -> None:
    with running("--", "sleep", "60", model) as process:
        wait_for(lambda: bool(children_of(process.pid)), "the command waits, or the daemon starts")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors


@needs_in_place
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_command_continues_without_a_reader_of_stderr(model: Path, options: list[str]) -> None:
    with running(*options, "--", "sh", "-c", "echo ready; sleep 2; exit 5", "sh", model) as process:
        assert process.stderr is not None and process.stdout is not None and process.stdout.readline() == "ready\n"
        process.stderr.close()
        process.stderr = None
        assert process.wait(timeout=60) == 5


@needs_in_place
def test_ignored_signals_stay_ignored() -> None:
    """As with `nohup`, but signals that only the Python interpreter ignores are reset."""

    def ignore() -> None:
        for number in (signal.SIGINT, signal.SIGQUIT):  # a shell ignores these for background jobs
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    code = "grep SigIgn /proc/self/status; sleep 3; echo end"
    with running("--", "sh", "-c", code, preexec_fn=ignore) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline().split()[1], 16) == 1 << signal.SIGHUP - 1
        process.send_signal(signal.SIGHUP)
        out, _ = process.communicate(timeout=60)
        assert (out, process.returncode) == ("end\n", 0)


@needs_in_place
def test_a_removed_working_directory(model: Path, tmp_path: Path) -> None:
    code = 'rmdir "$PWD"; exec "$@"'
    words = ["sh", "-c", code, "sh", sys.executable, "-m", "llmcache", "run", "--", "wc", "-c", str(model)]
    (tmp_path / "removed").mkdir()
    done = subprocess.run(
        words, env=environment(), cwd=tmp_path / "removed", capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, str(model.stat().st_size)), done.stderr


@needs_in_place
@pytest.mark.skipif(cgroup_version() is None, reason="no memory controller")
def test_a_command_that_is_killed_for_memory_is_reported(model: Path) -> None:
    code = "print('started', flush=True); bytearray(400 << 20)"
    done = llmcache("run", "--memory", "200M", "--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "started\n")
    assert "the kernel's OOM killer ended the command" in done.stderr and "(--memory 200 MB)" in done.stderr
    done = llmcache("run", "--memory", "4K", "--", "true", model)
    assert done.returncode == -signal.SIGKILL and "Traceback" not in done.stderr
    assert "killed by SIGKILL while it started" in done.stderr and "OOM killer" in done.stderr


@needs_in_place
@pytest.mark.skipif(cgroup_version() is None, reason="no memory controller")
def test_the_next_run_removes_the_cgroup_of_a_killed_one(model: Path) -> None:
    with running("--memory", "256Mi", "--", "sh", "-c", "echo ready; sleep 2") as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (child,) = children_of(process.pid)
        process.kill()
        wait_for(lambda: not Path(f"/proc/{child}").exists(), "the command ends by itself")
    assert list(Path("/sys/fs/cgroup").glob(f"**/llmcache-run-{process.pid}"))
    assert llmcache("run", "--memory", "256Mi", "--", "true").returncode == 0
    assert not list(Path("/sys/fs/cgroup").glob(f"**/llmcache-run-{process.pid}"))


@needs_in_place
def test_run_attaches_to_a_running_process(model: Path, digest: str) -> None:
    with subprocess.Popen([sys.executable, "-c", READER, model, "600"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().strip() == digest
            with running("--pid", str(process.pid)) as run:
                stderr_line(run, "steering model.gguf")
                run.send_signal(signal.SIGINT)
                run.communicate(timeout=60)
                assert run.returncode == 130 and process.poll() is None, "Ctrl-C detaches"
            with running("--pid", str(process.pid)) as run:
                stderr_line(run, "steering model.gguf")
                process.kill()
                run.communicate(timeout=60)
                assert run.returncode == 0, "the end of the process is the end of the run"
        finally:
            process.kill()


@needs_in_place
@pytest.mark.skipif(cgroup_version() is None, reason="no memory controller")
def test_memory_limits_the_command_by_a_cgroup(model: Path) -> None:
    find = (
        "find /sys/fs/cgroup -path '*llmcache-run-*' -name memory.limit_in_bytes -o -path '*llmcache-run-*' -name memory.max"
    )
    command = f"cat /proc/self/cgroup $({find})"
    done = llmcache("run", "--memory", "256Mi", "--", "sh", "-c", f"{command}; cat {model} > /dev/null")
    assert done.returncode == 0, done.stderr
    (name,) = set(re.findall("llmcache-run-[0-9]+", done.stdout))
    assert str(256 << 20) in done.stdout and not list(Path("/sys/fs/cgroup").glob(f"**/{name}"))


@needs_in_place
def test_a_command_of_root_runs_as_the_user_of_sudo(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmcache", "run", "--", "sh", "-c", "id -u; echo $HOME $USER", model],
        env=environment() | {"SUDO_USER": "nobody"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["65534", "/nonexistent", "nobody"], done.stderr


@needs_in_place
def test_an_impossible_change_of_user_is_refused_before_the_start() -> None:
    bare = ["setpriv", "--bounding-set=-setuid,-setgid", "--inh-caps=-setuid,-setgid"]
    done = llmcache("run", "--user", "nobody", "--", "true", wrap=lambda words: [*bare, *words])
    assert done.returncode == 3 and "cannot become user 'nobody'" in done.stderr, done.stderr


@needs_in_place
def test_models_in_memory_are_not_steered(model: Path) -> None:
    directory = Path("/dev/shm/llmcache-run-test")
    directory.mkdir(exist_ok=True)
    try:
        shutil.copy(model, directory)
        done = llmcache("run", "--", "wc", "-c", directory / model.name)
        assert done.returncode == 0 and done.stdout.split()[0] == str(model.stat().st_size)
        assert "its files are already in memory" in done.stderr
    finally:
        shutil.rmtree(directory)


def test_bad_arguments_give_the_documented_exit_code(model: Path) -> None:
    for words, code, text in (
        (["--", "nosuch-program"], 127, "cannot run 'nosuch-program'"),
        (["--", str(model)], 126, "it is not executable"),
        ([], 2, "give either a command after -- or --pid"),
        (["--pid", "1", "--", "true"], 2, "give either a command after -- or --pid"),
        (["--pid", "999999999"], 3, "process 999999999 does not exist"),
        (["--pid", "1", "--memory", "1G"], 2, "apply to a command"),
        (["--user", "nosuch-user", "--", "true"], 2, "user 'nosuch-user' does not exist"),
        (["--cache", "1K", "--", "true", str(model)], 3, "too small to stream through"),
        (["--cache", "much", "--", "true", str(model)], 2, "--cache: "),
    ):
        done = llmcache("run", *words)
        assert (done.returncode, text in done.stderr) == (code, True), (words, done.stderr)


# Ordinary users


@pytest.fixture
def as_user(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return a function that starts `llmcache run` as uid 65534, on a model of that user."""
    if os.geteuid() != 0 or shutil.which(NOBODY[0]) is None:
        pytest.skip("only root with setpriv can try what an ordinary user can do")
    if os.stat("/dev/fuse").st_mode & 0o006 != 0o006:
        pytest.skip("/dev/fuse is not open to ordinary users")
    place = Path(f"/var/tmp/llmcache-run-{os.getpid()}")
    (place / "models").mkdir(parents=True)
    (place / "lib").mkdir()
    copy_packages(place / "lib")
    own_model = shutil.copy(model, place / "models/theirs.gguf")
    for path in (place, place / "models", own_model):
        os.chown(path, 65534, 65534)
    (place / "no_namespaces.py").write_text(NO_NAMESPACES)
    python = python_for_nobody()

    def start(
        *words: str, namespaces: bool = True, code: str = READER, below: str = "", **variables: str
    ) -> subprocess.Popen[str]:
        prefix = [] if namespaces else [sys.executable, str(place / "no_namespaces.py")]
        command = [*prefix, *NOBODY, python, "-m", "llmcache", "run", "--cache", "16Mi", "--", python, "-c", code]
        more = {"HOME": "/nonexistent", "XDG_RUNTIME_DIR": "", "PYTHONPATH": str(place / "lib")}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        variables = {**environment(), **more, **variables}
        return subprocess.Popen([*command, own_model, *words], env=variables, cwd=place / below, **pipes)

    try:
        yield start
    finally:
        shutil.rmtree(place)


def points_of(run: subprocess.Popen[str]) -> list[str]:
    """Return the mount points made by a run, as other processes see them."""
    return [one.point for one in mounts().values() if os.path.basename(one.point).startswith(f"run-{run.pid}-")]


@pytest.mark.parametrize("namespaces", [True, False])
def test_the_mount_of_an_ordinary_user_ends_with_the_command(
    as_user: Callable[..., Any], digest: str, namespaces: bool
) -> None:
    process = as_user("30", namespaces=namespaces)
    try:
        assert process.stdout.readline().strip() == digest, process.stderr.read()
        points = points_of(process)
        assert bool(points) is not namespaces, "a private mount is seen by the command alone"
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert ("in a private mount namespace" if namespaces else "with the model paths in the arguments changed") in errors
    assert "not in place: mode inplace needs root" in errors and "over FUSE (arena)" in errors
    wait_for(lambda: not points_of(process), "nothing is mounted any more")
    assert not [point for point in points if os.path.exists(point)]


def test_the_working_directory_is_inside_the_private_mount(
    as_user: Callable[..., Any],
) -> None:
    code = "import os; print(os.major(os.stat('theirs.gguf').st_dev)); open('log.txt', 'w').write('written')"
    process = as_user(below="models", code=code)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "0\n"), errors  # a file system without a device: FUSE
    assert Path(f"/var/tmp/llmcache-run-{os.getpid()}/models/log.txt").read_text() == "written"


@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize("victim", ["run", "command"])
def test_the_mount_of_an_ordinary_user_ends_after_a_kill(as_user: Callable[..., Any], namespaces: bool, victim: str) -> None:
    process = as_user("40", namespaces=namespaces)
    try:
        process.stdout.readline()
        (child,) = children_of(process.pid)
        os.kill(process.pid if victim == "run" else child, signal.SIGKILL)
        process.wait(timeout=60)
        if victim == "command":
            assert process.returncode == -signal.SIGKILL
        wait_for(lambda: not Path(f"/proc/{child}").exists(), "the command ends")
        wait_for(lambda: not points_of(process), "its mount ends with it")
        wait_for(lambda: not daemons_for(child), "and its daemon ends")
    finally:
        process.kill()
        process.communicate()


def test_variables_and_links_are_redirected_to_the_mount(as_user: Callable[..., Any]) -> None:
    place = Path(f"/var/tmp/llmcache-run-{os.getpid()}")
    (place / "links").mkdir()
    link, real = place / "links/link.gguf", place / "models/theirs.gguf"
    link.symlink_to("../models/theirs.gguf")
    code = "import os, sys; open(sys.argv[2]); print(os.environ['LLAMA_ARG_MODEL'], sys.argv[2])"
    out, errors = as_user(str(link), namespaces=False, code=code, LLAMA_ARG_MODEL=str(real)).communicate(timeout=60)
    assert out.split(), errors
    for path in out.split():
        assert "/run-" in path and str(place) not in path


def test_the_next_run_removes_a_mount_left_by_kills(as_user: Callable[..., Any]) -> None:
    process = as_user("20", namespaces=False)
    try:
        process.stdout.readline()
        (child,) = children_of(process.pid)
        for pid in (process.pid, *daemons_for(child)):
            os.kill(pid, signal.SIGKILL)
        process.wait(timeout=60)
        wait_for(lambda: not Path(f"/proc/{child}").exists(), "the command ends")
    finally:
        process.kill()
        process.communicate()
    assert points_of(process)
    as_user("0", namespaces=False).communicate(timeout=60)
    assert not points_of(process)


def test_a_run_within_a_run_uses_its_mount(as_user: Callable[..., Any]) -> None:
    path = f"/var/tmp/llmcache-run-{os.getpid()}/models/theirs.gguf"
    inner = (
        f"os.execv(sys.executable, [sys.executable, '-m', 'llmcache', 'run', '--cache', '16Mi', '--', 'wc', '-c', '{path}'])"
    )
    process = as_user(code=f"import os, sys; {inner}")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and out.split()[0] == str(os.stat(path).st_size), errors
    assert "already steered by the mount on" in errors


def daemons_for(pid: int) -> list[int]:
    """Return the daemons that end when process `pid` ends."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            if b"--while" in words and words[words.index(b"--while") + 1] == str(pid).encode():
                found.append(int(name))
    return found


def test_ordinary_users_must_name_the_model(as_user: Callable[..., Any]) -> None:
    """Over FUSE, a file opened later is not served; the error lists the arguments that were examined."""
    python = python_for_nobody()
    with as_user() as process:
        process.communicate(timeout=60)
    place = Path(f"/var/tmp/llmcache-run-{os.getpid()}")
    more = {"HOME": "/nonexistent", "XDG_RUNTIME_DIR": "", "PYTHONPATH": str(place / "lib")}
    words = [*NOBODY, python, "-m", "llmcache", "run", "--", "sh", "-c", "echo started"]
    done = subprocess.run(words, env={**environment(), **more}, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    assert "no model file is named in '-c echo started'" in done.stderr


def test_doctor_of_a_copying_client_names_the_flag(model: Path) -> None:
    """`doctor --pid` examines a process that has the whole file in private memory."""
    code = "import sys; data = open(sys.argv[1], 'rb').read(); print('read', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        done = llmcache("doctor", "--pid", str(process.pid), "--json")
        process.stdin.close()
    findings = {entry["name"]: entry for entry in json.loads(done.stdout)["findings"]}
    assert findings["model file"]["facts"]["path"] == str(model)
    assert findings["weights"]["facts"]["cause"] == "no-mmap" and "--load-mode mmap" in findings["weights"]["remedy"]
