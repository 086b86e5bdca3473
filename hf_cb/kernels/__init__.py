"""Kernels in C++ for CPUs, and the door to their compiler."""
