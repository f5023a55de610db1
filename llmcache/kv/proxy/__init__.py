"""A proxy in front of an unmodified llama-server that stores prompts on disk, across restarts and changes of models.

http.py forwards requests and answers, server.py identifies the server and its model, slots.py selects the slot for a
request, prompts.py stores the contents of slots, proxy.py combines these, and command.py starts and ends the proxy.
"""
