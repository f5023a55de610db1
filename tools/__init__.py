"""Programs that work on the project: tests, demo, benchmarks."""
