"""Decisions of a mount: how files form loop spaces, and what to pin, fetch ahead and evict."""
