"""Agents that talk to the policy through an OpenAI-compatible endpoint."""
