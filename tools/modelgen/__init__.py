"""Random-weights Llama models of any size: what tests, demo and benchmarks run where no real model is at hand."""
