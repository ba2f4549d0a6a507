"""`dynatree bench`: measure decoders against plain decoding, on the same prompts in the same run."""
