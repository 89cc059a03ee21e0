"""How workers are implemented, one package a backend."""
