"""Spill files: keys and values of a context on disk, which survive a restart and are verified by checksums."""

from llmcache.kv.spill.file import SpillFile
from llmcache.kv.spill.layout import KvShape
from llmcache.kv.spill.reader import SpillReader

__all__ = ["KvShape", "SpillFile", "SpillReader"]
