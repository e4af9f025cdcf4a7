"""What this machine has, and who gets what: GPUs (NVML), CPUs and NUMA nodes (sysfs), selection, pinning. No CUDA is touched."""
