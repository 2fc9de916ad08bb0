"""The mathematics of the update: advantages, aggregation weights, surrogates, KL and the loss.

All pure functions of arrays. `advantage` turns a group's rewards into advantages; `aggregate` turns
their signs, the response lengths and the group ids into one weight per token of the whole batch;
`surrogate` and `kl` give one term per token; `loss` is the weighted sum of those terms and never
divides by a count, so that it adds up over any split of the batch; `diagnostics` turns the sums it
leaves behind into what is logged.
"""
