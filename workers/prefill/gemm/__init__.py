"""Matrix products: cuBLAS with the fastest algorithm for each shape, and kernels of our own on Hopper."""
