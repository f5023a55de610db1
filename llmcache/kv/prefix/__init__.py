"""Prompts on disk: blocks of a sequence's state, named by the model and all tokens up to their end, and shared by prefix."""
