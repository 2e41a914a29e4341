"""Copies of parts of the base model for each adapter: modules, biases, tables and their rows."""
