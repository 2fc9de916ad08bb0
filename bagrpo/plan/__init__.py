"""What a run would need and do on machines that are not there.

`chips` knows the slices and `environment` what JAX must be told first; `programs` compiles what the
loop runs; `hlo` reads the compiled text, in which `cost` counts, `products` the FLOPs; `estimate`
makes a step of it; `plan` does all that for a slice, or for many meshes; `table` shows it.
"""
