"""Products with matrices where the monokernel has them: expanded in registers, never in memory."""
