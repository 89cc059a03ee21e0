"""The contracts that plugin authors read: workers, roles, slots, offers, requests, components and hooks."""
