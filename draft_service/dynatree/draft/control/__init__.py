"""Learnt quantities of drafting: costs and acceptance."""
