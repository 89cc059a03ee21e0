"""Implementations of workers, one package per backend."""
