"""Traces of file-block accesses: the format, importers of other formats, conversion, generated shapes."""
