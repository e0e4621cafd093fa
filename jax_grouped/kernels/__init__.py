"""Operations that have a CUDA kernel: one module each, and what they share."""
