"""Rethinking I/O Caching for Large Language Model Inference on Resource-Constrained Mobile Platforms, recomputed.

H. Kim, J. Lee, H. Bahn, Mathematics 13(22), 3689, 2025. The paper's traces are not public: ours are synthetic, shaped
after its text. The paper prints figures 4 and 5 without numbers: its words are quoted and judged.
"""
