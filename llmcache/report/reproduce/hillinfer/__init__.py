"""Efficient Long-Context LLM Inference on the Edge with Hierarchical KV Eviction using SmartSSD (HillInfer), recomputed.

Anonymous ACL submission. Its figures print curves and bars whose numbers are not in the text: its words are quoted and
judged. It measures a machine that is not here: what it says, what the latency model gives for that machine, and what was
measured on this one stay apart.
"""
