"""Why a token was slow: the tokens of any engine that maps its model, each with its time and the causes of it.

`passes`, `clock`, `causes`, `summary` and `render` are pure; `observer` and `models` read the kernel; `watch` joins them.
"""

from __future__ import annotations

from llmcache.tokens.summary import Interval, Token, TokenSummary
from llmcache.tokens.watch import TokenWatch

__all__ = ["Interval", "Token", "TokenSummary", "TokenWatch"]
