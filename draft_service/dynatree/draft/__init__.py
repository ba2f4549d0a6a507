"""The draft service: grows token trees with the draft model and has the verify service check them."""
