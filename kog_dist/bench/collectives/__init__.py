"""Collectives: KCCL beside MPI and NCCL."""
