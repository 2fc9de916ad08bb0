"""Problems: where they come from, in which order, and which groups of rollouts are trained on.

`sources` and `arithmetic` read or generate rows, `problems` makes the run's problems of them,
`stream` puts these in order and remembers the position, `filter` is dynamic sampling.
"""
