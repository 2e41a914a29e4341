"""What users of `adapters` find at a model under its names there."""
