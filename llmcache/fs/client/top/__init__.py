"""`llmcache top`: what a mount does, live. replies -> sample -> view -> screen; watcher takes the looks."""
