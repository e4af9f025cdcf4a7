"""A distributed runtime that decodes one request as fast as the memory of a GPU node allows."""

__version__ = "0.1.0"
