"""Run a benchmark, all benchmarks or the demo: `tools/bench NAME [options]`. Without NAME, list them."""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

if not __package__:  # run as a directory: names such as `trace` must not be found in it
    sys.path[0] = ROOT
    venv = os.environ.get("LLMCACHE_VENV", os.path.join(ROOT, ".venv"))
    python = os.path.join(venv, "bin", "python")
    if os.path.exists(python) and os.path.realpath(sys.prefix) != os.path.realpath(venv):
        os.execv(python, [python, *sys.argv])  # the Python that tools/demo and tools/test set up

from importlib import import_module  # noqa: E402 - found through the lines above

from tools.bench import all as suite  # noqa: E402
from tools.bench.harness import run  # noqa: E402

OTHERS = {
    "all": "all benchmarks in sequence, and one page with all targets",
    "demo": "the comparison that tools/demo runs",
    "papers": "the measurements of llmcache reproduce",
}


def main(words: list[str]) -> int:
    """Run the named benchmark and return its exit code; 2 if the name is unknown."""
    known = {**{one.name: one.about for one in suite.BENCHMARKS}, **OTHERS}
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print("usage: tools/bench NAME [options]; tools/bench NAME --help\n")
        print("\n".join(f"  {name:16s}{about}" for name, about in known.items()))
        return 0
    if name not in known:
        print(
            f"tools/bench: error: unknown benchmark {name!r}\nhint: the benchmarks are {', '.join(known)}", file=sys.stderr
        )
        return 2
    module = import_module(f"tools.bench.{name}")
    return int(module.main(words[1:]) if name in OTHERS else run(module, words[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
