"""Traces of file-block accesses: recording, the format, importers of other formats, conversion, generated shapes."""
