"""What of a model and of the KV cache prefill works with: matrices, buffers, chunks of a prompt, memory."""
