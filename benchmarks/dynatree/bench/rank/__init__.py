"""`dynatree rank`: drafts of one target, by measured tokens/s."""
