"""Calls to services: HTTP, retries, limits, routing, the audit log."""
