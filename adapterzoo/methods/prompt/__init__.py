"""Trained positions before the tokens: prefix tuning in attention, prompt tuning at the input."""

from .prefix_tuning import PrefixTuningConfig as PrefixTuningConfig
from .prompt_tuning import PromptTuningConfig as PromptTuningConfig
