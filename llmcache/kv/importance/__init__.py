"""Which tokens matter: evaluation on host and device at a time (HIE), hits, and pools that follow them (BKP)."""
