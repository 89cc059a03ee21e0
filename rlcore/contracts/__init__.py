"""All that a plugin's author reads: workers, roles, slots, offers, requests, components and hooks."""
