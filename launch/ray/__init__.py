"""`--launcher ray`: ranks that a Ray cluster places."""
