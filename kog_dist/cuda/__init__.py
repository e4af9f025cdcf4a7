"""What every device program needs, whoever launches it: a compiler with a cache, and the calls of the driver."""
