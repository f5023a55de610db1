"""The face of a FUSE mount: a file system over SOURCE, from libfuse's callbacks to open files."""
