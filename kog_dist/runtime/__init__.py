"""What every process of an engine stands on: shared memory, bounded waits, who a rank is, children, folders and sockets."""
