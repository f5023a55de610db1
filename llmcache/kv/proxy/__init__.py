"""A proxy in front of an unmodified llama-server that stores prompts on disk, across restarts and changes of models."""
