"""`--launcher mpi`: ranks that mpirun started."""
