"""The process that serves a mount: its life, its log, and what it answers."""
