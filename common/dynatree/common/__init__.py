"""Types and functions shared by the draft service and the verify service."""
