"""The state that the engine and the back ends of a mount share, and the interfaces between them.

Terms, in the order in which to read the files:
- loop space (`space.LoopSpace`): a file, or the shards of a model in order, cut into extents; `SpaceFile`: one of its
  files. Its facts and its plan are in the base class, `llmcache.cache.space.Space`.
- rank: position of an extent in the order in which readers visit the space; a pass is one visit of the whole order.
- accounted bytes: an upper bound of the bytes of an extent in the page cache (`accounting.Accounting`).
- pending invalidations: ranges that wait to be dropped from the page cache.
- tripwire: a page left out of the page cache on purpose, so that the next use of its extent or expert sends a
  request.
- partial extents: extents that are in the page cache only in part; for experts, pages that the kernel has read around
  faults.
- window: bytes that loaders fetch ahead of the readers of a space, and that stay cached for readers shortly behind.
- convoy: readers of a space that stay so close to each other that one fetch serves all of them.
- exposure: making the next touch of resident extents observable, to see whether clients still use them.
- left: a space is left to the kernel while LRU reads less than steering.
"""
