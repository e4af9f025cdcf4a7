"""What a model is: its shape, its files, its reference arithmetic, its tokenizer and chat template."""
