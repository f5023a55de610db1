"""Spill files: the keys and values of a context on disk, restored after a restart, never served torn or wrong."""

from llmcache.kv.spill.file import SpillFile
from llmcache.kv.spill.layout import KvShape
from llmcache.kv.spill.reader import SpillReader

__all__ = ["KvShape", "SpillFile", "SpillReader"]
