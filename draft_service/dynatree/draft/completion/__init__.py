"""A completion: its rounds, from the prompt to its end."""
