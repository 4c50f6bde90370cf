"""Rowpost: one personalised message to each row of a recipient list, exactly once or with a recorded reason why not."""

__version__ = "0.1.0"
