"""Training from Python: turns a caller's functions, rows and settings into files and keys of the run."""
