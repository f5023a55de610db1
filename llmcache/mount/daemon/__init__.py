"""The process that serves a mount: its start and end, its logs, control requests and metrics."""
