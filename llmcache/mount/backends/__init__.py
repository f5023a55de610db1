"""How extents enter and leave the page cache: in place, through FUSE (steer), or from memory of the daemon (arena)."""
