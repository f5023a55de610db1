"""Refresh accounting: which rows a run keeps in eDRAM, and what refreshing them costs by group."""

from llmcache.edram.refresh.account import RULES, GroupAccount, RefreshAccount, account
from llmcache.edram.refresh.recorder import RunRecorder
from llmcache.edram.refresh.run import SCHEMA, EdramRun, parse_run, read_run

__all__ = [
    "RULES",
    "SCHEMA",
    "EdramRun",
    "GroupAccount",
    "RefreshAccount",
    "RunRecorder",
    "account",
    "parse_run",
    "read_run",
]
