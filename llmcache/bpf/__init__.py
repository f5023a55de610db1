"""Loading BPF programs and reading their records. The C source is in `bpf/` of the project."""
