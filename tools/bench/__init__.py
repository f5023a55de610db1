"""Benchmarks and the demo of llmcache."""
