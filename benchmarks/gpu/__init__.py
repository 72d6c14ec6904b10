"""Measurements that need CUDA cards."""
