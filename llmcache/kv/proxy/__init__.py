"""A proxy in front of an unmodified llama-server that stores prompts on disk, across restarts and changes of models.

proxy.py combines http.py, server.py (identity of the server and its model), slots.py and prompts.py; command.py starts
and ends it.
"""
