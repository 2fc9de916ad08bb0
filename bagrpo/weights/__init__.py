"""Model weights: safetensors folders and GGUF files in, sharded parameters; safetensors out."""
