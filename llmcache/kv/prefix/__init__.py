"""Prompts on disk: blocks of a sequence's state under names that tell the model and all tokens before, shared by prefix."""
