"""Serving: transformers' server, with an adapter for each request."""
