"""A proxy in front of the stock llama-server: prompts on disk that survive restarts and changes of models.

proxy.py composes the rest: http.py moves requests and answers, server.py identifies the server and its model, slots.py
decides which slot a request gets, prompts.py stores what a slot holds, command.py starts and ends it all.
"""
