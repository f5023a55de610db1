"""Indexes that find important keys without reading all: the DCI-tree, page summaries, and scorers that use them."""
