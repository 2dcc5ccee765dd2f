"""Whole programs that use funcspec."""
