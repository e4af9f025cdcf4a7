"""Training of small Laneformers: data, tokenizer, loop, evaluation."""
