"""PEFT: its methods at every model, its config objects, and `PeftModel`."""
