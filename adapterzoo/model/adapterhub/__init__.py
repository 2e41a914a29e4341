"""Attributes of a model under the names that they have in `adapters`."""
