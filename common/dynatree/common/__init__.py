"""What the draft and the verify service are both made of."""
