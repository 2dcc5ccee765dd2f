"""Kernels: one concern a file, each with the Triton kernel, its launcher and a torch reference."""
