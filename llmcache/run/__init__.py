"""`llmcache run`: steer the page cache under the model files of any engine."""
