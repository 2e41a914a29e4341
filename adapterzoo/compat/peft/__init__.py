"""PEFT: its methods for every model, its config objects, and `PeftModel`."""
