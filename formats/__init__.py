"""Bytes to values and back. Opens nothing, asks no time, remembers nothing, and knows nothing of `engine`."""
