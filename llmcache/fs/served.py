"""What `llmcache mount --json` prints once the mount serves: who serves what, and what `auto` has come to."""

from __future__ import annotations

import json
from typing import Any

from llmcache.fs import control
from llmcache.fs.asking import ask

SCHEMA = "llmcache.mount/1"


def announce(point: str, log: str | None) -> None:
    """Print the document of the mount on a real path, on stdout at once."""
    print(json.dumps(document(point, log)), flush=True)


def document(point: str, log: str | None) -> dict[str, Any]:
    """Returns it, as the daemon tells; `log`: where its log goes, None for a terminal. MountProblem if none answers."""
    stats = ask(point, {"op": "stats"})
    told = control.files(point).describe()
    return {
        "schema": SCHEMA,
        "pid": told.get("pid"),
        "source": told.get("source"),
        "mount": point,
        **{key: stats[key] for key in ("mode", "budget_bytes", "helper_pid")},
        "log": log,
    }
