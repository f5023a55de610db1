"""SOURCE: its directory tree, the rights of callers, and its open files."""
