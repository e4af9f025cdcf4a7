"""What a worker runs a plan with: the CPU engine (interpreter) and the CUDA engine (monokernel)."""
