"""Conversion of an adapter to another method, with a certificate of what it changes."""
