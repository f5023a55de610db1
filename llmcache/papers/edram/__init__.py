"""Kelle on a modelled eDRAM accelerator: eviction and recomputation, adaptive refresh, and the cost of both."""
