"""What a mount decides: groups of extents, what their readers do, and with that what to keep, bring in and drop."""
