"""Benchmarks and the demo of llmcache, and the cgroup helpers that they share."""
