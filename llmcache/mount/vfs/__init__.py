"""The file system of a FUSE mount over SOURCE: libfuse's callbacks, operations and open files."""
