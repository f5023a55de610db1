"""`llmcache doctor`: what this machine offers to each part of llmcache, and what to do about what it lacks.

One file per area (`mounting`, `memory`, `tracing`, `machine`, `packages`), each with one function that returns its
`Finding`s; `examine` asks them all. Nothing is probed in a second way here: the findings come from the code that the
commands themselves decide by.
"""
