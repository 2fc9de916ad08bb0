"""From rollouts to a new policy: rows into micro-batches, gradients, one optimizer update."""
