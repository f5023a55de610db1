"""The claims about accuracy: figure 8 of hillinfer and section 4.3; *measured here*, with a small model that recalls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcache.report.claims import Claim, Finding, graded

FULL = "full"
SYSTEMS = {"h2o": "H2O-like", "prefetch": "prefetch-based", "hillinfer": "HillInfer"}
"""What figure 8 compares with the full cache."""
ALPHAS = (0.05, 0.1, 0.2, 0.4)
COMPARABLE, CLOSE = 0.01, 0.05  # of all answers
TOKENS, CONTEXTS, QUESTIONS = 4096, 8, 32
QUICK_TOKENS, QUICK_CONTEXTS, QUICK_QUESTIONS = 1024, 4, 8
MEASURED = "recall model"


@dataclass(frozen=True)
class Accuracy:
    """Shares (0 .. 1) of right answers: `full` with everything kept, `by_system[system][alpha]`; `answers` each."""

    tokens: int
    answers: int
    full: float
    by_system: Mapping[str, Mapping[float, float]]


def measured(quick: bool) -> Accuracy:
    """Returns figure 8 with the recall model. EnvironmentProblem: torch or transformers are missing."""
    from llmcache.kv.tasks import RECALL_MODEL, recall
    from llmcache.kv.transformers import check_versions

    check_versions()
    from llmcache.kv.bench.subject import accuracy, load_model

    sizes = (QUICK_CONTEXTS, QUICK_TOKENS, QUICK_QUESTIONS) if quick else (CONTEXTS, TOKENS, QUESTIONS)
    contexts, tokens, asked = sizes
    questions = recall(np.random.default_rng(8), contexts, tokens, questions=asked)
    model: Any = load_model(RECALL_MODEL)
    by_system = {
        name: {alpha: accuracy(model, questions, name, alpha=alpha) for alpha in _possible(tokens)} for name in SYSTEMS
    }
    return Accuracy(tokens, contexts * asked, accuracy(model, questions), by_system)


def _possible(tokens: int) -> list[float]:
    """Alphas whose tokens hold more than sink and window, which every policy keeps."""
    return [alpha for alpha in ALPHAS if alpha * tokens >= 64]


def comparable(data: Accuracy, system: str) -> Finding:
    """Whether a system at alpha = 0.2 answers as often right as the full cache."""
    found = data.by_system[system][0.2]
    loss = data.full - found
    told = ", ".join(f"alpha {alpha:g}: {share:.3f}" for alpha, share in data.by_system[system].items())
    ours = f"full cache {data.full:.3f}; {told} ({data.answers} answers, contexts of {data.tokens:,} tokens)"
    return Finding(graded(loss <= COMPARABLE, loss <= CLOSE), ours, {"full": data.full, "at_0.2": found})


def trade_off(data: Accuracy, system: str) -> Finding:
    """Whether alpha from 0.1 to 0.2 is enough, while less is not."""
    rows = data.by_system[system]
    enough = [alpha for alpha, share in rows.items() if data.full - share <= COMPARABLE]
    least = min(enough, default=1.0)
    ours = f"within {COMPARABLE} of the full cache from alpha {least:g} on" if enough else "at no alpha that was tried"
    return Finding(graded(0.1 <= least <= 0.2, bool(enough)), ours, {"least_alpha": least})


CLAIMS: tuple[Claim[Accuracy], ...] = (
    Claim(
        "comparable-accuracy",
        "4.3",
        "HillInfer maintains comparable accuracy to these baselines",
        "at alpha 0.2, at most 0.01 fewer right answers than with the full cache; partly: at most 0.05",
        comparable,
        tuple(SYSTEMS),
    ),
    Claim(
        "alpha-trade-off",
        "4.3",
        "setting the importance rate between 10% and 20% generally yields a favorable trade-off",
        "the least alpha that loses at most 0.01 is from 0.1 to 0.2; partly: another one does",
        trade_off,
        tuple(SYSTEMS),
    ),
)
