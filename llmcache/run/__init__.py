"""`llmcache run`: run or attach to any engine, and steer the page cache under the model files that it uses."""
