"""What eviction and lost bits do to a model's answers: measured on a small model in numpy, with modelled losses."""

from llmcache.edram.accuracy.decoder import Decoder
from llmcache.edram.accuracy.evaluation import Estimate, Outcome, Variant, accuracy, evaluate, harm
from llmcache.edram.accuracy.experiments import EXPERIMENTS, Accuracies, Row, Setup, custom, run
from llmcache.edram.accuracy.recording import record_run

__all__ = [
    "EXPERIMENTS",
    "Accuracies",
    "Decoder",
    "Estimate",
    "Outcome",
    "Row",
    "Setup",
    "Variant",
    "accuracy",
    "custom",
    "evaluate",
    "harm",
    "record_run",
    "run",
]
