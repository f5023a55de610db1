"""Why a token was slow: the tokens of any engine that maps its model, with times and causes.

`passes`, `clock`, `causes`, `summary` and `render` are pure.
"""

from __future__ import annotations

from llmcache.tokens.summary import Interval, Token, TokenSummary
from llmcache.tokens.watch import TokenWatch

__all__ = ["Interval", "Token", "TokenSummary", "TokenWatch"]
