"""What users of PEFT, and of transformers' mixin for it, find at a model under its names there."""
