"""Verdicts: programs that say whether a completion is right.

`score` is the face of it: a `Scorer` turns (problem, completion) into a `Verdict`. It sends the
checks to `pool`, whose processes run `worker`. There `kinds` names the verifiers: `math_answer`,
`choice`, `code` (in the `sandbox`, under the `driver`), `pattern`, `gym` and `function`.

Nothing a model wrote is looked at in the caller's process.
"""
