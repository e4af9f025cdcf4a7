"""The monokernel from the host's side: what it is compiled for, how it is built, loaded, fed and launched."""
