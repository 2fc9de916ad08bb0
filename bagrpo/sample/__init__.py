"""Prompts in, completions out: prefill, continuous batching and decoding over a fixed set of slots.

`engine` decides on the host which sample goes to which slot; `programs` holds the compiled
programs it calls, one for each shape; those are made of `decode` (prefill and the token loop) and
`slots` (the state of the slots, and what changes it), and `draw` picks the tokens. `request` is
what is asked for, `transcript` turns ids into a completion.
"""
