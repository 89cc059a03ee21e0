"""Training from Python: functions, rows and settings that a caller holds become files and keys of the run."""
