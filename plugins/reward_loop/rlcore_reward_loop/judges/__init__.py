"""Judges: the question they get, and the score in their answer."""
