"""A forward pass: its segments, its attention, and its handling of NaN and infinity."""
