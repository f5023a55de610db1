"""Spill files: the keys and values of a context on disk, restored after a restart, never served torn or wrong."""

from llmcache.kv.spill.file import SpillFile
from llmcache.kv.spill.layout import KvPages, KvShape, PageBuffer
from llmcache.kv.spill.reader import Recovery, SpillReader

__all__ = ["KvPages", "KvShape", "PageBuffer", "Recovery", "SpillFile", "SpillReader"]
