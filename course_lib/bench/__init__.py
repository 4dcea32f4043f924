"""What `./course bench` measures: every kernel beside NumPy, beside plain C, and beside what this
machine's memory and arithmetic units can do at most, all in one run."""
