"""Writers of other trace formats: `write(reader, path)` writes what a TraceReader holds to a file that does not exist."""
