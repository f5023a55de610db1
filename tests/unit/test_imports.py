"""The architecture, checked on syntax trees: allowed imports, libraries behind one file, optional and heavy libraries."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.unit.command_parts import loaded

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "llmcache").rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))
ALL_FILES = [*PACKAGE, *TOOLS, *sorted((ROOT / "tests").rglob("*.py"))]

MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in PACKAGE}

# The parts of the package that each part may import ("*": all); every part may import itself.
BASE = {"units", "errors", "documents", "files", "arrays", "procfs", "storage", "memory"}
ALLOWED = {
    "errors": set(),
    "units": {"errors"},
    "documents": {"errors"},
    "files": {"errors"},
    "arrays": set(),
    "procfs": {"units", "errors"},
    "storage": {"procfs", "units", "errors"},
    "cgroup": {"procfs", "storage", "errors"},
    "memory": {"procfs"},
    "bpf": BASE,
    "trace.record": BASE,
    "trace.formats": BASE | {"trace.record"},
    "trace": BASE | {"trace.record", "trace.formats", "bpf", "run.child"},
    "model": BASE | {"trace.record"},
    "cache": BASE | {"model", "trace.record", "trace.formats"},
    # The layers of a mount. `mount` itself has what all of them use, and other parts import any of them.
    "mount": BASE | {"mount.client.control"},
    "mount.client.control": BASE,
    "mount.source": BASE | {"mount", "model"},
    "mount.state": BASE | {"mount", "mount.source", "cache", "model"},
    "mount.engine": BASE | {"mount", "mount.source", "mount.state", "cache", "model"},
    "mount.backends": BASE | {"mount", "mount.source", "mount.state", "cache", "model", "bpf"},
    "mount.vfs": BASE | {"mount", "mount.source", "mount.state", "mount.engine", "mount.backends", "model"},
    "mount.client": BASE | {"mount.*", "cache", "model", "trace.record"},
    "mount.daemon": BASE | {"mount.*", "cache", "model", "trace.record"},
    "tokens": BASE | {"bpf", "mount.*", "model"},
    "tokens.command": BASE | {"tokens", "mount.*", "model", "run", "run.child"},
    "run.child": BASE | {"cgroup", "run.namespaces"},
    "run.namespaces": BASE,
    "run": BASE | {"cache", "mount.*", "model", "cgroup", "tokens", "run.child", "run.namespaces"},
    "kv": BASE | {"cache", "model", "papers.csd"},
    "kv.proxy": BASE | {"kv", "model", "run.child"},
    "papers.csd": BASE | {"kv"},
    "papers.edram": BASE | {"cache", "kv", "report"},
    "papers": BASE | {"cache", "model", "trace.record", "kv", "papers.edram", "report"},
    "doctor": BASE | {"trace", "mount.*", "bpf", "run"},
    "report": BASE | {"cache", "model", "trace.record", "trace.formats", "trace", "kv"},
    "cli": {"*"},
    "__main__": {"cli"},
    "__init__": set(),
}
# Libraries that only one file may import, so that their quirks are handled in one place.
ONLY_IN = {"mfusepy": "llmcache/mount/vfs/libfuse.py", "fuse": "llmcache/mount/vfs/libfuse.py"}
# Modules that need the libraries of an extra; all others work without them and start faster.
EXTRAS = {
    "llmcache.kv.transformers": {"torch", "transformers"},
    "llmcache.kv.bench.subject": {"torch", "transformers"},
    "llmcache.kv.llama": {"llama_cpp"},
    "llmcache.cache.cluster": {"distributed"},
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below `node`; expressions contain none."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, block, []):
            yield child
            yield from statements(child)


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Return the full names of all modules that `path` imports, also in functions; `from a import b` gives "a" and "a.b"."""
    found: list[str] = []
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(found)


@functools.cache
def imported_files(path: Path) -> frozenset[str]:
    """Return the modules of the package that `path` imports; `from a import b` is an import of `b` if that is a module."""
    found = set[str]()
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in MODULES else node.module or "" for name in names)
    return frozenset(found & MODULES.keys())


def part_of(module: str) -> str:
    """Return the part of the package that `module` (without "llmcache.") belongs to."""
    parts = (part for part in ALLOWED if f"{module}.".startswith(f"{part}."))
    return max(parts, key=len, default=module.split(".")[0])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_point_one_way() -> None:
    for path in PACKAGE:
        own = part_of(".".join(path.relative_to(ROOT / "llmcache").with_suffix("").parts))
        assert own in ALLOWED, f"{own} is not a part of the package: see ALLOWED"
        for name in sorted(imported_files(path) - {"llmcache"}):
            part = part_of(name.removeprefix("llmcache."))
            allowed = ALLOWED[own] & {part, f"{part.split('.')[0]}.*", "*"}
            assert part == own or allowed, f"{path}: {own} must not import {name}"


def test_no_files_import_each_other() -> None:
    """Imports for types, and in functions, count too."""
    unvisited = {own: set(imported_files(path)) - {own} for own, path in MODULES.items()}
    while leaves := [own for own, others in unvisited.items() if not others & unvisited.keys()]:
        for own in leaves:
            del unvisited[own]
    assert not unvisited, f"these files import each other, or import files that do: {sorted(unvisited)}"


def test_a_wrapped_library_is_imported_in_one_file() -> None:
    for path in PACKAGE:
        assert all(ONLY_IN.get(name.split(".")[0], relative(path)) == relative(path) for name in imports(path)), path


def is_below(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def test_libraries_of_extras_are_imported_only_when_used() -> None:
    for path in PACKAGE:
        own = relative(path).removesuffix(".py").replace("/", ".")
        used = {name.split(".")[0] for name in imports(path)}
        allowed = set().union(*(libraries for module, libraries in EXTRAS.items() if is_below(own, module)))
        assert not used & set().union(*EXTRAS.values()) - allowed, path
        at_once = [node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {getattr(node, "module", None) or "" for node in at_once}
        foreign = [module for module, libraries in EXTRAS.items() if not libraries <= allowed]
        assert not [name for name in names for module in foreign if is_below(name, module)], path


# The daemon imports nothing large: its memory comes on top of the budget, and a mount must start quickly.
LARGE = {"numpy", "numba", "pyarrow", "matplotlib", "distributed", "scipy", "pandas"}
DAEMON = [
    "llmcache.cli.mount",
    "llmcache.mount.client.mount",
    "llmcache.mount.daemon.daemon",
    "llmcache.mount.engine.engine",
    "llmcache.mount.daemon.controlserver",
    "llmcache.mount.engine.warmup",
    "llmcache.mount.daemon.openmetrics",
    "llmcache.mount.engine.report",
    "llmcache.mount.client.settings",
    "llmcache.mount.daemon.logs",
    "llmcache.mount.daemon.accesslog",
    "llmcache.cache.steering",
    "llmcache.cache.loops",
    "llmcache.cache.detector",
]


def test_the_daemon_imports_no_large_library() -> None:
    assert not LARGE & loaded(f"import {', '.join(DAEMON)}")
