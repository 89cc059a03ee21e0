"""The core's agent loop."""
