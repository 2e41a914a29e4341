"""Everything that is known of the classes of transformers."""
