"""What all rooms of prefill share: arrays of either library, chunks, matrices, the cache's layout, parts of device code."""
