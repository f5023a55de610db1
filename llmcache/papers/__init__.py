"""What reproduces the four papers: claims and verdicts, the eDRAM accelerator, the emulated computational SSD, traces.

`reproduce` computes the pages; each paper has a module and a table of claims (`NAME.toml`, and `NAME.json` for long ones).
"""
