"""One engine as its clients see it: tokens per second, stages of a request, faults, endurance."""
