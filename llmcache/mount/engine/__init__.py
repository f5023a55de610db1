"""Decisions of a mount: which files form a loop space, what clients use of them, and what to pin, fetch ahead and evict."""
