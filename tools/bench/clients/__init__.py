"""Clients of the benchmarks: plain scripts, each its own process."""
