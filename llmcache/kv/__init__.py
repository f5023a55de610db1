"""Keys and values of transformers outside of GPU memory: pages in memory tiers and spill files, and prompts on disk."""
