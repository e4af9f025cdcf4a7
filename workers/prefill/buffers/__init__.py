"""Memory that prefill works in."""
