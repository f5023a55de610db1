"""llmcachefs: mounts, their file system and daemon, and the engine that decides what stays in the page cache."""
