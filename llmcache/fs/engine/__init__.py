"""Decisions of a mount: loop spaces, what clients do with them, and therefore what to pin, fetch ahead and evict."""
