"""The benchmark behind `llmcache kv bench`: policies over a synthetic stream, or a real model with a task."""
