"""Quantised weights as codes and scales, and the forms in which files hold them."""
