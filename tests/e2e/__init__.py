"""The commands a user types."""
