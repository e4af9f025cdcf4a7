"""`kog-bench peers`: other engines beside this one, on one machine, with one set of weights."""
