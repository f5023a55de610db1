"""The KV spill manager: pages of keys and values in tiers, in a file, and scored near where they lie."""
