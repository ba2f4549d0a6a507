"""A model over several devices: one process each, of which the first serves and the others follow it."""
