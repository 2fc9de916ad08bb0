"""One decoder for all model families: `family` says what a model is, `decoder` computes it."""
