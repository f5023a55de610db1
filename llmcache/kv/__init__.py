"""Keys and values of transformers: pages in memory tiers and spill files, scoring next to the data, and prompts on disk."""
