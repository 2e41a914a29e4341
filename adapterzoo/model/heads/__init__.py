"""The heads of a model: named ones, or the static head of a task class."""
