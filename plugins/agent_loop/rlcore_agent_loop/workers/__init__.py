"""Conversations under way in this process, and in workers of the role `agent`."""
