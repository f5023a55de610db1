"""The means by which a mount does what its engine decides: in place so far, steer and arena beside it in `llmcache.fs`."""
