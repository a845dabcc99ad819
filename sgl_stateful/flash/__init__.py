"""Flash Queries: questions that are registered on a session and answered before they are asked.

Source: "Stateful Transformers" (arXiv 2605.13784). ``table`` is the state machine, without I/O and without an engine;
``worker`` evaluates in idle time, and ``service`` is what routes and requests use.
"""
