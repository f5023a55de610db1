"""The wheel, installed as pipx does and without the source tree: every command gives a real result."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest

from llmcache.cli import app
from llmcache.errors import MissingRequirement
from llmcache.kv.prefix.store import WHOLE, Block, BlockKey, BlockStore
from llmcache.kv.tasks import RECALL_MODEL
from llmcache.mount.client import mountpoint
from llmcache.papers.edram.refresh import EdramRun, Flow
from tests.conftest import TIERS
from tools.make_man import walk

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "MANIFEST.in",
    "mkdocs.yml",
    "pyproject.toml",
)
PARTS = ("bpf", "docs", "llmcache", "requirements", "tools", "traces", *FILES)
IN_SOURCES = {"bpf/iotrace.bpf.c", "docs/index.md", "docs/tokens.svg", "tools/test", "tools/_setup.sh", *FILES}
PATIENCE_S = 300
# Commands that a user types, in chains: each uses the files of those before it.
ALONE = (
    (
        "llmcache help stats",
        "llmcache completion bash",
        "llmcache size --bw 100 --loop 70M --ram 1G",
        "llmcache config --show",
        "llmcache doctor",
        "llmcache info $SHARE/traces/claude.parquet",
        "llmcache convert $SHARE/traces/read-loop.parquet loop.csv",
        "llmcache classify $SHARE/traces/read-loop.parquet",
        "llmcache plot $SHARE/traces/read-loop.parquet -o loop.svg",
        "llmcache simulate $SHARE/traces/read-loop.parquet --policy lru --cache 50%",
        "llmcache trace -o true.parquet -- true",
        "llmcache tokens -- true",
        "llmcache run -- true" if os.geteuid() == 0 else "llmcache run --help",
        "llmcache reproduce icecache -o paper",
        "llmcache edram model",
        "llmcache edram sweep --json > sweep.json",
        "llmcache edram plot sweep.json -o sweep.svg",
        "llmcache edram report run.json",
        "llmcache serve-llama --help",
        "llmcache edram accuracy --flips none --sequences 2 --context 64 --pairs 2 --questions 1",
    ),
    (
        "llmcache kv profile .",
        "llmcache kv bench --context 1k --layers 1 --steps 1 --policy full --path . --json > bench.json",
        "llmcache kv plot bench.json -o bench.svg",
        "llmcache kv plan --model config.json --context 16k",
        "llmcache kv proxy --help",
        "llmcache kv list prompts",
        "llmcache kv show prompts 0000",
        "llmcache kv prune prompts --keep 0",
    ),
)
ON_A_MOUNT = (
    "llmcache mount source mnt --cache 32Mi --mode arena",
    "llmcache stats",
    "llmcache stats mnt",
    "llmcache top mnt 100ms --once",
    "llmcache resize mnt 48Mi",
    "llmcache warmup mnt",
    "llmcache evict mnt",
    "llmcache umount mnt",
    "llmcachefs source mnt --cache 32Mi --mode arena && llmcache umount mnt",
    "PATH=/usr/bin:/bin $BIN/mount.llmcachefs source mnt -o cache=32Mi,mode=arena && llmcache umount mnt",
)
BY_MODEL = ("llmcache kv bench --task recall --policy window --context 256 --budget 64 --cases 1 --path .",)


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel and the packages of this environment, and an empty directory with a home.

    PATH has only the home's .local/bin, with links to the wheel's programs, as pipx exposes a package to its user.
    `sources`: names of files in the source distribution.
    """

    prefix: Path
    place: Path
    sources: frozenset[str]

    @property
    def home(self) -> Path:
        return self.place / "home"

    def expose(self) -> None:
        """Link the wheel's programs and manual pages into .local of the home, as pipx does."""
        (record,) = self.prefix.glob("lib/python*/site-packages/llmcache_toolkit-*.dist-info/RECORD")
        for line in record.read_text().splitlines():
            path = Path(os.path.normpath(record.parent.parent / line.partition(",")[0]))
            for kind in (self.prefix / "bin", self.prefix / "share" / "man"):
                if kind in path.parents:
                    link = self.home / ".local" / path.relative_to(self.prefix)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(path)

    def run(self, line: str) -> str:
        """Run `line` in a shell; return a message if it fails, else an empty string."""
        known = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "XDG_", "LLMCACHE"))}
        local = f"{self.home}/.local/bin"
        own = {"BIN": local, "SHARE": f"{self.prefix}/share/llmcache", "HOME": str(self.home)}
        others = [one for one in os.environ["PATH"].split(":") if not (Path(one) / "llmcache").exists()]
        path = ":".join((local, *others))
        done = subprocess.run(
            ["sh", "-c", line], cwd=self.place, env={**known, **own, "PATH": path, "PYTHONNOUSERSITE": "1"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        fine = {0, MissingRequirement.exit_code} if line == "llmcache doctor" else {0}  # this machine may lack a requirement
        return "" if done.returncode in fine else f"$ {line}\n{done.stderr}exit code {done.returncode}\n"

    def all(self, lines: Sequence[str]) -> str:
        return "".join(map(self.run, lines))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The installed wheel, built from a source distribution of a copy of this tree (setuptools leaves files there)."""
    base = tmp_path_factory.mktemp("wheel")
    tree, prefix, place = (base / name for name in ("tree", "environment", "place"))
    for name in PARTS:
        (tree / name).parent.mkdir(exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(ROOT / name, tree / name)
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, base], check=True, cwd=tree, stdout=subprocess.DEVNULL)
    (archive,) = base.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        sources = frozenset(name.partition("/")[2] for name in opened.getnames())
    pip, alone = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"], ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *alone, "--no-build-isolation", "-w", base, archive], check=True, cwd=base)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    (wheel,) = base.glob("*.whl")
    to = ["--python", str(prefix / "bin" / "python"), "install", *alone, "--no-compile"]
    subprocess.run([*pip, *to, wheel], check=True, cwd=base)
    shutil.rmtree(tree)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(prefix), "platbase": str(prefix)}))
    others = [path for path in sys.path if Path(path).name.endswith("-packages") and Path(path).is_dir()]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    copy_compiled(site)
    for directory in (place / "home", place / "source", place / "mnt"):
        directory.mkdir(parents=True)
    (place / "source" / "tokenizer.json").write_text("{}")
    shutil.copy(RECALL_MODEL / "config.json", place)
    EdramRun(64, 0, {"kv": (Flow(8, 0, 8),), "x": (Flow(),)}, durations_ns=(2e7,)).save(place / "run.json")
    prompts = BlockStore(place / "prompts", 10**6)
    prompts.describe("0" * 32, {"file": "m.gguf", "architecture": "llama", "name": "m"})
    prompts.write(BlockKey("0" * 32, "0" * 40, 0, WHOLE), Block(np.zeros(64, np.uint8), (1,)))
    environment = Installed(prefix, place, sources)
    environment.expose()
    yield environment
    if mountpoint.find(str(place / "mnt")) is not None:
        environment.run("llmcache umount --force mnt")


def copy_compiled(site: Path) -> None:
    """Copy numba's compiled code of this tree; numba checks the date and size of the source files."""
    for code in (ROOT / "llmcache").rglob("*.py"):
        shutil.copystat(code, site / code.relative_to(ROOT))
    for compiled in (ROOT / "llmcache").rglob("__pycache__/*.nb[ci]"):
        (site / compiled.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy2(compiled, site / compiled.relative_to(ROOT))


def test_every_command_is_in_a_chain() -> None:
    lines = [*(line for chain in ALONE for line in chain), *ON_A_MOUNT, *BY_MODEL]
    leaves = {words for words, command in walk(app, "llmcache") if not isinstance(command, click.Group)}
    assert {words for words in leaves if not any(f"{line} ".startswith(f"{words} ") for line in lines)} == set()


@pytest.mark.long
def test_every_command_works_without_the_source_tree(installed: Installed) -> None:
    """A single test, because each xdist worker that runs tests of this file would build the wheel."""
    code = "import llmcache; print(llmcache.__path__[0])"
    output = subprocess.check_output([installed.prefix / "bin" / "python", "-I", "-c", code], text=True, cwd=installed.place)
    package = Path(output.strip())
    assert installed.prefix in package.parents
    objects = {path.name for path in (ROOT / "llmcache" / "bpf" / "objects").glob("*.bpf.o")}
    assert {path.name for path in (package / "bpf" / "objects").iterdir()} == objects != set()
    assert installed.sources >= IN_SOURCES and not any("/results/" in name for name in installed.sources)
    local = installed.home / ".local"
    assert {path.name for path in (local / "bin").iterdir()} == {"llmcache", "llmcachefs", "mount.llmcachefs"}
    pages = {path.name for path in (ROOT / "tools" / "man").glob("man?/*")}
    assert {path.name for path in (local / "share" / "man").glob("man?/*")} == pages
    share = installed.prefix / "share"
    unit = ROOT / "tools" / "systemd" / "llmcachefs@.service"
    assert (share / "llmcache" / unit.name).read_text() == unit.read_text()
    traces = {path.name for path in (ROOT / "traces").iterdir()}
    assert {path.name for path in (share / "llmcache" / "traces").iterdir()} == traces

    chains_by_tier = {"mount": ON_A_MOUNT, "transformers": BY_MODEL}
    chains = [*ALONE, *(chain for tier, chain in chains_by_tier.items() if TIERS[tier][0]() is None)]
    with ThreadPoolExecutor(2) as workers:
        assert "".join(workers.map(installed.all, chains)) == ""
