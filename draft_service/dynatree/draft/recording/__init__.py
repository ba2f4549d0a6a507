"""Recording of completions, as texts for the training of a draft model."""
