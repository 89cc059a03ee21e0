"""The core's own agent loop."""
