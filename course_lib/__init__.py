"""Library of the course: what the notebooks import."""

__version__ = "0.1.0"
