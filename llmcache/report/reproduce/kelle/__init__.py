"""Kelle: Co-design KV Caching and eDRAM for Efficient LLM Serving in Edge Computing, recomputed.

T. Xia and S. Q. Zhang, MICRO 2025, doi:10.1145/3725843.3756071. Its accelerator exists as RTL and simulators that are not
public: every number here is modelled, from the constants that the paper prints and from named public ones. Where a number
does not follow from those, the row says so. Figures 13 to 16 are images without numbers: only what the text says is judged.
"""
