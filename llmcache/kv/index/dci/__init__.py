"""The DCI-tree (M-DCI), which finds the keys with the largest products without a scan of all.

Source: icecache.txt, sections 3.3 and 4, algorithms 1 to 4.
"""

from llmcache.kv.index.dci.file import load_indexes, path_of, save_indexes
from llmcache.kv.index.dci.index import DciIndex, DciSettings, Nearest

__all__ = ["DciIndex", "DciSettings", "Nearest", "load_indexes", "path_of", "save_indexes"]
