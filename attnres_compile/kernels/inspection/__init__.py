"""What generated kernels compile to, for GPUs that need not be there."""
