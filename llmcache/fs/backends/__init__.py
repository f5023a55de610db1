"""How that is done: in place, in the page cache of a FUSE mount (steer), or in memory of the daemon (arena)."""
