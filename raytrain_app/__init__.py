"""Elastic training of PyTorch and Keras models on Ray: nothing restarts, nothing changes, nothing is lost."""

__version__ = "0.1.0"
