"""Ways to find the keys that matter without reading all: the DCI-tree, page summaries, and who chooses among them."""
