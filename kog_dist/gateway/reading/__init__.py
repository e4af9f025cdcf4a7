"""From the tokens of an answer to thoughts, text and calls: one reader for all families of models (docs/answers.md)."""
