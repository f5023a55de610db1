"""Readers of other trace formats, one file or folder each: `read(path, writer)` appends rows and files to a TraceWriter."""
