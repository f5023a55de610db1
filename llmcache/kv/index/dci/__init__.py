"""The DCI-tree (M-DCI): a hierarchy of keys that finds those with the largest products without looking at all.

Source: icecache.txt, sections 3.3 and 4, algorithms 1 to 4.
"""

from llmcache.kv.index.dci.heads import Chosen, DciHeads
from llmcache.kv.index.dci.index import DciIndex, Found
from llmcache.kv.index.dci.saved import load_indexes, save_indexes
from llmcache.kv.index.dci.settings import DciSettings

__all__ = ["Chosen", "DciHeads", "DciIndex", "DciSettings", "Found", "load_indexes", "save_indexes"]
