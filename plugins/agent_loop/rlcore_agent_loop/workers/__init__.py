"""Conversations in progress, in this process and in workers of the role `agent`."""
