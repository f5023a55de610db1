"""Boots kernels of Debian in QEMU and runs commands and checks in them: `tools/vm`, the nightly set, and the MGLRU table."""
