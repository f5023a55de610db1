"""The process that serves a mount: its start and end, logs, control requests and metrics."""
