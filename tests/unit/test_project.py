"""The project files agree with the code: dependencies, pins, versions, commands."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llmcache
from tests.unit.test_imports import imports

ROOT = Path(__file__).resolve().parents[2]

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return found[0].lower().replace("_", "-")


def imported(files: Iterator[Path]) -> set[str]:
    """Return the top-level names of all modules that `files` import, without the standard library."""
    names = {name.split(".")[0] for path in files for name in imports(path)}
    return names - set(sys.stdlib_module_names) - {"llmcache"}


def pins(name: str) -> dict[str, list[str]]:
    """Return the pinned requirements of a file in requirements/ by name; environment markers allow several lines."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line and not line.startswith("#"):
            found.setdefault(name_of(line), []).append(line)
    return found


def test_declared_dependencies_match_the_imports() -> None:
    declared = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    for extra in ("cluster", "redis", "transformers"):
        declared |= {name_of(requirement) for requirement in PROJECT["optional-dependencies"][extra]}
    names = {"llama_cpp": "llama-cpp-python", "prometheus_client": "prometheus-client"}
    declared.add("llama-cpp-python")  # from the extra, which also brings gguf for tools
    found = {names.get(name, name) for name in imported((ROOT / "llmcache").rglob("*.py"))}
    assert found == declared


def test_every_dependency_has_a_lower_bound_and_a_pin() -> None:
    extras = PROJECT["optional-dependencies"]
    groups = {"lock.txt": PROJECT["dependencies"] + extras["cluster"] + extras["redis"] + extras["dev"]}
    groups["llama.txt"] = extras["llama"]
    groups["transformers.txt"] = extras["transformers"]
    groups["docs.txt"] = extras["docs"]
    for file, requirements in groups.items():
        pinned = pins(file)
        for requirement in requirements:
            assert ">=" in requirement
            assert name_of(requirement) in pinned, f"{requirement} is not pinned in requirements/{file}"
        assert all("==" in line for lines in pinned.values() for line in lines)


def test_requirements_files_pin_the_same_versions() -> None:
    found: dict[str, list[str]] = {}
    for file in ("lock.txt", "llama.txt", "transformers.txt"):
        for name, lines in pins(file).items():
            assert found.setdefault(name, lines) == lines, f"{name} of requirements/{file}"


def test_the_oldest_tested_transformers_is_the_lower_bound() -> None:
    (declared,) = (line for line in PROJECT["optional-dependencies"]["transformers"] if line.startswith("transformers"))
    lowest = re.search(r">=([0-9.]+)", declared)
    assert lowest
    oldest = pins("transformers-oldest.txt")
    assert oldest["transformers"] == [f"transformers=={lowest[1]}.0"]
    llama = pins("llama.txt")
    assert all(oldest[name] == llama[name] for name in set(oldest) & set(llama))


def test_the_version_is_the_same_everywhere() -> None:
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", llmcache.__version__)
    released = re.findall(r"^## (\d\S+) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == llmcache.__version__
    wheel = f"llmcache_toolkit-{llmcache.__version__}-py3-none-any.whl"
    assert all(wheel in (ROOT / page).read_text() for page in ("README.md", "docs/index.md"))
