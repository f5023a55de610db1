"""`llmcache trace`: records the block accesses of running processes. Capture writes a trace; it knows no reports."""
