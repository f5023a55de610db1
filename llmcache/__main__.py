"""`python -m llmcache`, the same as the `llmcache` command."""

from llmcache.cli import main

if __name__ == "__main__":
    main()
