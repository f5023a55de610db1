#!/usr/bin/env python3
"""Trains the recall model: 460,000 parameters that find values by their keys in 4096 tokens of noise.

    tools/train_recall.py OUT                    from scratch: 3 phases, about 15 minutes on one processor
    tools/train_recall.py OUT --start MODEL      only the last phase, on a model trained on short contexts

Phases: copying (to look up the token that followed an earlier one), recall in contexts of doubling length, recall in long
contexts. In the last phase positions jump, so that the model sees distances beyond the length of a context (Zhu et al.,
2023, PoSE). The same arguments on the same machine give the same model; the defaults give RECALL_MODEL of llmcache.kv.tasks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmcache.errors import UsageError, run_cli
from llmcache.kv.tasks import recall
from llmcache.kv.tasks.recall import VOCABULARY

LENGTHS = (64, 128, 256, 512, 1024)
LONG_LENGTHS, LONG_SHARES = (512, 1024, 2048, 4096), (0.1, 0.1, 0.3, 0.5)
ROTATION = 1e5
"""The base of the rotary embedding."""
FARTHEST = 8192
"""Largest position in training: twice the longest context."""


@dataclass(frozen=True)
class TrainingBatch:
    """Texts [batch, tokens], flags of the tokens to predict, and positions (None: 0, 1, ...)."""

    ids: NDArray[np.int64]
    predicted: NDArray[np.bool_]
    positions: NDArray[np.int64] | None = None


def copying(rng: np.random.Generator, batch: int, tokens: int) -> TrainingBatch:
    """Return texts that repeat a random string; the repetitions are to be predicted."""
    ids = np.empty((batch, tokens), np.int64)
    predicted = np.zeros((batch, tokens), np.bool_)
    for row in range(batch):
        period = int(rng.integers(8, tokens // 2))
        ids[row] = np.resize(1 + rng.choice(VOCABULARY - 1, period, replace=False), tokens)
        predicted[row, period + 1 :] = True
    return TrainingBatch(ids, predicted)


def recalling(rng: np.random.Generator, batch: int, tokens: int) -> TrainingBatch:
    """Return contexts with questions; the answers are to be predicted."""
    most = min(64, tokens // 8)
    pairs = int(rng.integers(max(2, most // 4), most + 1))
    questions = max(4, min(64, tokens // 8))
    found = recall(rng, batch, tokens - 2 * questions, pairs=pairs, questions=questions)
    predicted = np.zeros((batch, tokens), np.bool_)
    predicted[:, found.ids.shape[1] + 1 :: 2] = True
    return TrainingBatch(found.with_answers(), predicted)


def far_recalling(rng: np.random.Generator, tokens: int) -> TrainingBatch:
    """Return long contexts whose positions jump twice, up to FARTHEST."""
    texts = recalling(rng, max(1, 8192 // tokens), tokens)
    jumps = np.zeros(tokens, np.int64)
    if tokens < max(LONG_LENGTHS):
        places = rng.choice(np.arange(1, tokens), 2, replace=False)
        jumps[places] = (rng.dirichlet(np.ones(2)) * rng.integers(0, FARTHEST - tokens)).astype(np.int64)
    return TrainingBatch(texts.ids, texts.predicted, np.arange(tokens) + np.cumsum(jumps))


class Teacher:
    """Trains a model, batch by batch. `accuracy`: running mean (weight 0.1 for the newest batch)."""

    def __init__(self, model: Any, rate: float, log: Callable[[str], None]) -> None:
        self.model, self.rate, self.log = model, rate, log
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.98))
        self.steps, self.accuracy = 0, 0.0

    def teach(self, texts: TrainingBatch, rate_share: float = 1.0) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * rate_share
        ids = torch.from_numpy(texts.ids)
        positions = None if texts.positions is None else torch.from_numpy(texts.positions)[None].expand(len(ids), -1)
        hidden = self.model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        predicted = torch.from_numpy(texts.predicted[:, 1:])
        logits, answers = self.model.lm_head(hidden[:, :-1][predicted]), ids[:, 1:][predicted]
        loss = torch.nn.functional.cross_entropy(logits, answers)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        right = float((logits.argmax(-1) == answers).float().mean())
        self.accuracy = 0.9 * self.accuracy + 0.1 * right
        self.steps += 1
        if self.steps % 50 == 0:
            self.log(f"step {self.steps}, {ids.shape[1]} tokens: loss {loss.item():.3f}, accuracy {self.accuracy:.3f}")


def learn_short(teacher: Teacher, rng: np.random.Generator, most_steps: int) -> None:
    """Train copying, then recall in contexts of doubling length, each to an accuracy of 97 %; warm up over 50 steps."""
    stages: Iterator[Callable[[], TrainingBatch]] = iter(
        [lambda: copying(rng, 64, 64), *(lambda n=n: recalling(rng, max(4, 4096 // n), n) for n in LENGTHS)]
    )
    for number, stage in enumerate(stages):
        teacher.accuracy, begun = 0.0, teacher.steps
        while teacher.accuracy < 0.97 and teacher.steps < most_steps:
            teacher.teach(stage(), min(1.0, (teacher.steps + 1) / 50))
        teacher.log(f"stage {number}: {teacher.steps - begun} steps, accuracy {teacher.accuracy:.3f}")


def learn_long(teacher: Teacher, rng: np.random.Generator, steps: int) -> None:
    """Train recall in long contexts, while the learning rate falls to 3 %."""
    for step in range(steps):
        tokens = int(rng.choice(LONG_LENGTHS, p=LONG_SHARES))
        rate = min(1.0, (step + 1) / 20) * max(0.03, 1 - step / steps)
        teacher.teach(far_recalling(rng, tokens), rate)


def new_model() -> Any:
    """Return the untrained model: Qwen2 with 2 layers, 4 heads of 32 over 2 key heads."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    rope = {"rope_theta": ROTATION, "rope_parameters": {"rope_type": "default", "rope_theta": ROTATION}}
    tokens = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None, "max_position_embeddings": 65536}
    config = Qwen2Config(**sizes, **heads, **rope, **tokens, tie_word_embeddings=False, initializer_range=0.05)
    return Qwen2ForCausalLM(config)


def known(model: Any, tokens: int, contexts: int) -> float:
    questions = recall(np.random.default_rng(123), contexts, tokens)
    right = []
    with torch.no_grad():
        for ids, answers in zip(questions.with_answers(), questions.answers, strict=True):
            hidden = model.model(input_ids=torch.from_numpy(ids)[None], use_cache=False).last_hidden_state
            right.append(model.lm_head(hidden[0, tokens::2]).argmax(-1).numpy() == answers)
    return float(np.mean(right))


def train(options: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Any]:
    if options.out.exists() and any(options.out.iterdir()):
        raise UsageError(f"OUT: {options.out} is not empty", "name a new directory")
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(options.seed)
    if options.start is None:
        model = new_model()
        teacher = Teacher(model, 3e-3, log)
        learn_short(teacher, rng, options.short_steps)
    else:
        from transformers import Qwen2ForCausalLM

        model = Qwen2ForCausalLM.from_pretrained(options.start)
    teacher = Teacher(model.train(), 1e-3, log)
    learn_long(teacher, rng, options.long_steps)
    model.eval().save_pretrained(options.out)
    _name_rotation(options.out / "config.json")
    result = {"seed": options.seed, "long_steps": options.long_steps, "start": str(options.start or "nothing")}
    result["known"] = {tokens: known(model, tokens, options.contexts) for tokens in (512, 1024, 2048, 4096)}
    (options.out / "training.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _name_rotation(config: Path) -> None:
    """Add the base of the rotary embedding under the name of transformers 4; version 5 writes only `rope_parameters`."""
    found = json.loads(config.read_text())
    config.write_text(json.dumps({**found, "rope_theta": ROTATION}, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    parser.add_argument("--start", type=Path, metavar="MODEL", help="directory of a model to continue with")
    parser.add_argument(
        "--short-steps", type=int, default=4000, help="most steps in the first two phases (default: %(default)s)"
    )
    parser.add_argument("--long-steps", type=int, default=700, help="steps in the last phase (default: %(default)s)")
    parser.add_argument(
        "--contexts", type=int, default=16, help="contexts of each length to test the model with (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    print(json.dumps(train(_arguments(), lambda line: print(line, file=sys.stderr))))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
