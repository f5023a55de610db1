"""Tools for the development of llmcache: tests, demo, benchmarks, traces and manual pages."""
