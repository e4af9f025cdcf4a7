"""The processes that serve requests: one worker per rank, and the coordinator."""
