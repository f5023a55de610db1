"""Spill files: the keys and values of a context on disk, restored after a restart, never served torn or wrong."""

from llmcache.kv.spill.file import SpillFile
from llmcache.kv.spill.reader import SpillReader
from llmcache.kv.spill.recovery import Recovery
from llmcache.kv.spill.shape import KvPages, KvShape, Room

__all__ = ["KvPages", "KvShape", "Recovery", "Room", "SpillFile", "SpillReader"]
