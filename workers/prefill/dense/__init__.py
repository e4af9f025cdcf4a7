"""Prefill of models with one residual stream: Llama, Mistral, Qwen."""
