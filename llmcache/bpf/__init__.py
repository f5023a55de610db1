"""BPF programs in the kernel: loading them, and reading what they send. Their C source is in `bpf/` of the project."""
