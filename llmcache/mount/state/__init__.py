"""The state that the engine and the back ends of a mount share, and the interfaces between them.

- loop space: a file, or the shards of a model in order, cut into extents.
- rank: position of an extent in the order in which readers visit the space; a pass is one visit of the whole order.
- accounted bytes: an upper bound of the bytes of an extent in the page cache.
- pending invalidations: ranges that wait to be dropped from the page cache.
- tripwire: a page left out of the page cache, so that the next use of its extent or expert sends a request.
- partial extents: extents of which only a part is in the page cache.
- window: bytes that loaders fetch ahead of readers, and that stay cached for readers shortly behind.
- convoy: readers so close to each other that one fetch serves all of them.
- exposure: making the next touch of resident extents observable.
- left: a space is left to the kernel while LRU reads less than steering.
"""
