"""What each rank does for a token, as data, and the proofs that it is right."""
