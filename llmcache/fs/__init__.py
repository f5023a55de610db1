"""llmcachefs: the mount, its operations, and the policy that decides what the page cache keeps."""
