"""Loading BPF programs (C source: `bpf/` of the project) and reading their records."""
