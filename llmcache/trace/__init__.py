"""Traces of file-block accesses: recording, formats, conversion."""
