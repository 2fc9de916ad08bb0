"""Evaluation: problems are sampled several times, verified, and summed up with their uncertainty.

`evaluate` runs it, `results` sums up, shows and writes what came out. Beneath are `passk`, the
estimators for one problem, `votes`, who votes for what in them, and `interval`, means over problems
with confidence intervals.
"""
