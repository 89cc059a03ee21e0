"""Judges: what they are asked, and the score that an answer holds."""
