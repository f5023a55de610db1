"""llmcache: run models and contexts larger than memory on Linux without the page cache falling off a cliff."""

__version__ = "1.0.0"
