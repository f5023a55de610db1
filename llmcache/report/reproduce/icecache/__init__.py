"""IceCache (ICLR 2026) recomputed: what its tables and figures claim, asked of a small model that recalls.

The paper's models and data sets are not downloaded: their tables stand on the page as the paper prints them, and stay
blank beside. `llmcache kv bench --task … --model DIR` asks a model of the user's the same.
"""
