"""What processes, pipes and files ask of the operating system."""
