"""Man pages and shell completion, from the flags: `python -m kog_dist.manual FOLDER`. Nothing imports it."""
