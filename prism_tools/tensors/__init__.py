"""Tensor values: what a communication event computes, and the file that keeps what was communicated."""
