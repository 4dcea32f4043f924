# Empty so far.
